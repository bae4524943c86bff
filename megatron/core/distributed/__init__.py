"""Data parallelism: gradients in contiguous buffers."""

from megatron.core.lazy import lazy_names

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        ".data_parallel_config": "DataParallelConfig",
        ".distributed_data_parallel": "DistributedDataParallel finalize_model_grads",
        ".buffer": "MemoryBuffer ParamAndGradBuffer",
    },
)
