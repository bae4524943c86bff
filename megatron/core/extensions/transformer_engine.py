"""Megatron core's names of Transformer Engine's layers, for our own layers, which compute the same."""

from typing import Any

from torch import Tensor

from megatron.core.base.lazy_imports import names_of_megatron
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.torch_norm import FusedLayerNorm


class TELayerNormColumnParallelLinear(ColumnParallelLinear):
    """A norm, then a column-parallel linear layer. forward(x [s, b, h]) -> (y [s, b, out/t], bias or None)"""

    def __init__(self, input_size: int, output_size: int, *, config: Any, **options: Any):
        super().__init__(input_size, output_size, config=config, **options)
        self.norm = FusedLayerNorm(config, input_size, config.layernorm_epsilon)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the linear layer of norm(x): x [s, b, h] -> (y [s, b, out/t], bias or None).

        Every tensor-parallel rank must call.
        """
        return super().forward(self.norm(x))


TENorm = FusedLayerNorm


TEColumnParallelLinear = ColumnParallelLinear


TERowParallelLinear = RowParallelLinear


TEDotProductAttention = DotProductAttention

__getattr__ = names_of_megatron(__name__)
