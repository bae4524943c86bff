"""The optimizer: updates the parameters of this rank, element by element in flat buffers.

    settings, param_groups              the table OPTIMIZERS and the settings; which parameters are updated alike (no torch)
    optimizer, update, sliced, whole    the update of flat buffers, in slices, or of whole tensors
    torch_groups, group_schedule        the update and its rates under torch's param_groups, for loops of one's own
    step_schedules                      learning rates by steps, under DeepSpeed's names
    muon_config, muon                   Muon: its settings (no torch), its update of whole matrices
    lr_schedule, loss_scale             learning rate and weight decay by samples; float16's loss scale (no torch)

May import: floors 0 to 2, of which it uses `distributed`.
To add an optimizer: a line of OPTIMIZERS, also from a script.
"""

from megatron.core.base.lazy_imports import lazy_names

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        ".flat_optimizer": "FlatOptimizer",
        ".flat_optimizer_config": "OPTIMIZERS UpdateRule",
        "megatron.core.classic.optimizers": "MegatronOptimizer OptimizerConfig get_megatron_optimizer",
        ".muon_update": "muon_update",
        ".param_groups": "ParamGroup",
        ".update_rules": "adam_l2_update adam_update sgd_update",
    },
)
