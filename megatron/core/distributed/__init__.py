"""Data parallelism: gradients in contiguous buffers, reduced over ranks, with or without ZeRO's shards.

    data_parallel, distributed_data_parallel       the wrapper of a model chunk; with Megatron's arguments
    data_parallel_config, buffer_plan,             on paper: settings, layout, counts, bytes (no torch)
    grad_count, zero_stage_comm_volume
    contiguous_buffers,                            the memory of all parameters, of one collective, of one parameter
    bucket_reduce_and_gather, param_grad_state
    zero_stage_strategies, zero3_param_fetcher,    when gradients are reduced, and parameters gathered and released
    released_params_and_grads_guards
    zero_init, sync_and_gather_params              a model built shard by shard; full parameters of a sharded one
    clear_reduce_divide_gradients                  the protocol of a step's gradients, and their divisor
    finalize_model_grads, params_norm_and_zeros    the last reductions of a step; norms over all ranks
    reduce_in_microbatch_order,                    sums in one order for any number of ranks; a check of the order of
    zero_collective_order_check                    collectives

To add a strategy of reduction: a `GradReduce`, chosen in `DistributedDataParallel._choose_strategies`.
"""

from typing import TYPE_CHECKING

from megatron.core.base.lazy_imports import lazy_names

if TYPE_CHECKING:
    from megatron.core.distributed.contiguous_buffers import (
        MemoryBuffer as MemoryBuffer,
        ParamAndGradBuffer as ParamAndGradBuffer,
    )
    from megatron.core.distributed.data_parallel_config import DataParallelConfig as DataParallelConfig
    from megatron.core.distributed.distributed_data_parallel import DistributedDataParallel as DistributedDataParallel
    from megatron.core.distributed.distributed_data_parallel_config import (
        DistributedDataParallelConfig as DistributedDataParallelConfig,
    )
    from megatron.core.distributed.finalize_model_grads import finalize_model_grads as finalize_model_grads

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        ".data_parallel_config": "DataParallelConfig",
        ".distributed_data_parallel": "DistributedDataParallel",
        ".distributed_data_parallel_config": "DistributedDataParallelConfig",
        ".finalize_model_grads": "finalize_model_grads",
        ".contiguous_buffers": "MemoryBuffer ParamAndGradBuffer",
    },
)
