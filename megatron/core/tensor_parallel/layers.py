"""Megatron's module of the split layers, which are in `linear_layers` (Megatron: core/tensor_parallel/layers.py)."""

from megatron.core.base.lazy_imports import names_of_megatron
from megatron.core.tensor_parallel.linear_layers import (
    ColumnParallelLinear as ColumnParallelLinear,
    RowParallelLinear as RowParallelLinear,
    TensorParallel as TensorParallel,
    VocabParallelEmbedding as VocabParallelEmbedding,
    tensor_parallel_of as tensor_parallel_of,
)

__getattr__ = names_of_megatron(__name__)
