"""Data parallelism: gradients in contiguous buffers, summed over ranks, with or without ZeRO's shards.

    data_parallel               the wrapper of a model chunk
    finalize_model_grads        the end of a step's gradients, in a loop of one's own
    plan, buffer, bucket, slot  where a parameter lies: on paper (no torch), in memory, per collective, per parameter
    zero, fetch, released       ZeRO stages: when gradients are reduced, and parameters gathered and released
    elements                    parameters and gradients, each element once over all ranks: norms, zeros
    made_in_shards              a block in which a model is built shard by shard
    fixed_order, call_order     sums in one order for any number of ranks; a check of the order of collectives

May import: floors 0 and 1; no other mechanism.
To add a strategy of reduction: a `GradReduce`, chosen in `DistributedDataParallel._choose_strategies`.
"""

from megatron.core.base.lazy_imports import lazy_names

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        ".data_parallel_config": "DataParallelConfig",
        "megatron.core.classic.data_parallel": "DistributedDataParallel DistributedDataParallelConfig",
        ".finalize_model_grads": "finalize_model_grads",
        ".grad_buffer": "MemoryBuffer ParamAndGradBuffer",
    },
)
