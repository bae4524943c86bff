"""The names of Transformer Engine's layers in Megatron core: our own layers, which compute the same."""

from typing import Any

from torch import Tensor

from megatron.core.classic.layers import DotProductAttention
from megatron.core.classic.modules import FusedLayerNorm
from megatron.core.classic.tensor_parallel import ColumnParallelLinear, RowParallelLinear


class TELayerNormColumnParallelLinear(ColumnParallelLinear):
    """A norm, and a linear layer sharded by columns. forward(x) -> (y, bias or None)"""

    def __init__(self, input_size: int, output_size: int, *, config: Any, **options: Any):
        super().__init__(input_size, output_size, config=config, **options)
        self.norm = FusedLayerNorm(config, input_size, config.layernorm_epsilon)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        return super().forward(self.norm(x))


TENorm = FusedLayerNorm
TEColumnParallelLinear, TERowParallelLinear = ColumnParallelLinear, RowParallelLinear
TEDotProductAttention = DotProductAttention
