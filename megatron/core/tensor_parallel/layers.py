"""Megatron's path of its parallel layers. Our layers, which take their axis, are in `linear_layers`."""

from megatron.core.base.lazy_imports import lazy_names

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "megatron.core.classic.tensor_parallel": "ColumnParallelLinear RowParallelLinear VocabParallelEmbedding",
        "megatron.core.tensor_parallel.linear_layers": "TensorParallel",
    },
)
