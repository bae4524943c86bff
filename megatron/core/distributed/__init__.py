"""Data parallelism: gradients in contiguous buffers."""

from megatron.core.lazy import lazy_names

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "DataParallelConfig": "data_parallel_config",
        "DistributedDataParallel": "distributed_data_parallel",
        "MemoryBuffer": "memory_buffer",
        "ParamAndGradBuffer": "memory_buffer",
        "finalize_model_grads": "distributed_data_parallel",
    },
)
