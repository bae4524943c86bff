"""A layer of one's own from core blocks: attention and MLP read the same input, side by side, and are added at once.

    x -> x + scale * (attention(norm(x)) + mlp(norm(x)))

Everything that is divided over ranks is inside the blocks, so the layer needs no thought of parallelism; it has no parameter
of its own. One that has makes it with `tp.replicated(...)` or `tp.parameter(...)`, which say where it lives.
"""

from dataclasses import dataclass

from torch import Tensor, nn

from megatron.core.config import ConfigError, knob
from megatron.core.random import DropoutKeys, HiddenDropout
from megatron.core.tensor_parallel.layers import TensorParallel
from megatron.core.transformer.attention import ParallelAttention
from megatron.core.transformer.mlp import ParallelMLP
from megatron.core.transformer.norm import make_norm
from megatron.core.transformer.transformer_config import TransformerConfig


@dataclass(frozen=True)
class SideBySideConfig:
    """Side by side."""

    branch_scale: float = knob(
        1.0, "what attention and MLP are multiplied with before they are added to the residual stream"
    )

    def __post_init__(self) -> None:
        if not 0 < self.branch_scale <= 1:
            raise ConfigError(f"--branch-scale is {self.branch_scale}; it must be above 0 and at most 1")


class SideBySideLayer(nn.Module):
    """forward(x [s, b, h] ([s/t, b, h] under sequence parallelism), mask, angles) -> the same shape."""

    def __init__(
        self, config: TransformerConfig, own: SideBySideConfig, layer: int, *, tp: TensorParallel, keys: DropoutKeys
    ):
        super().__init__()
        self.scale = own.branch_scale
        self.layernorm = make_norm(config.normalization, config.hidden_size, config.norm_epsilon, tp)
        self.self_attention = ParallelAttention(config, layer, tp=tp, keys=keys)
        self.mlp = ParallelMLP(config, tp=tp)
        self.dropout = HiddenDropout(config.hidden_dropout, keys, "side by side", layer, tp.sequence_axis)

    def forward(self, x: Tensor, mask: Tensor | None = None, angles: Tensor | None = None) -> Tensor:
        normed = self.layernorm(x)
        return x + self.dropout(self.scale * (self.self_attention(normed, mask, angles) + self.mlp(normed)))
