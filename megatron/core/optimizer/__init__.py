"""The optimizer: updates the parameters of this rank, element by element in flat buffers.

    optimizer_flags_and_registry, param_groups    OPTIMIZERS, settings; groups of parameters updated alike (no torch)
    flat_optimizer, adam_and_sgd                  the update of flat buffers; AdamW and SGD
    gather_full_matrices_over_tp,                 updates of full matrices
    muon_matrix_update
    matrix_owners                                 their division among ranks (no torch)
    cpu_offloading/, split_master                 state on the host or in files; masters in two halves
    lr_wd_schedule_by_samples, loss_scaler        learning rate and weight decay by samples; float16's loss scale (no
                                                  torch)
    flat_optimizer_with_param_groups              the update under torch's param_groups, for a script's own loop
    write_lr_into_param_groups                    learning rates for such a loop
    deepspeed_lr_schedules                        the same by DeepSpeed's names and formulas
    megatron_optimizer, optimizer_config          Megatron's names over these

To add an optimizer: an entry of OPTIMIZERS, also from a script.
"""

from typing import TYPE_CHECKING

from megatron.core.base.lazy_imports import lazy_names

if TYPE_CHECKING:
    from megatron.core.optimizer.adam_and_sgd import (
        adam_l2_update as adam_l2_update,
        adam_update as adam_update,
        sgd_update as sgd_update,
    )
    from megatron.core.optimizer.flat_optimizer import FlatOptimizer as FlatOptimizer
    from megatron.core.optimizer.megatron_optimizer import (
        MegatronOptimizer as MegatronOptimizer,
        get_megatron_optimizer as get_megatron_optimizer,
    )
    from megatron.core.optimizer.muon_matrix_update import muon_update as muon_update
    from megatron.core.optimizer.optimizer_config import OptimizerConfig as OptimizerConfig
    from megatron.core.optimizer.optimizer_flags_and_registry import OPTIMIZERS as OPTIMIZERS, UpdateRule as UpdateRule
    from megatron.core.optimizer.param_groups import ParamGroup as ParamGroup

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        ".flat_optimizer": "FlatOptimizer",
        ".optimizer_flags_and_registry": "OPTIMIZERS UpdateRule",
        ".megatron_optimizer": "MegatronOptimizer get_megatron_optimizer",
        ".optimizer_config": "OptimizerConfig",
        ".muon_matrix_update": "muon_update",
        ".param_groups": "ParamGroup",
        ".adam_and_sgd": "adam_l2_update adam_update sgd_update",
    },
)
