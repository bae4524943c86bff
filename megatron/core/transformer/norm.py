"""Normalization of the residual stream, or of heads. Under sequence parallelism a rank normalizes its part of the
sequence.

The computation has the dtype of the input, so a float32 residual stream loses no precision; the result has the dtype
of the weight. `partial`: whether a rank's gradient is partial; None: under sequence parallelism.
"""

from torch import Tensor, nn
from torch.nn import functional

from megatron.core.placement import Constant
from megatron.core.tensor_parallel.linear_layers import TensorParallel
from megatron.core.transformer.context import LayerContext
from megatron.core.transformer.transformer_config import TransformerConfig


class LayerNorm(nn.Module):
    """x -> (x - mean) / sqrt(var + epsilon) * weight + bias over the last dimension."""

    def __init__(self, width: int, epsilon: float, tp: TensorParallel, partial: bool | None = None):
        super().__init__()
        self.epsilon = epsilon
        self.weight = tp.replicated((width,), Constant(1.0), partial=partial)
        self.bias = tp.replicated((width,), Constant(0.0), partial=partial)

    def forward(self, x: Tensor) -> Tensor:
        weight, bias = self.weight.to(x.dtype), self.bias.to(x.dtype)
        return functional.layer_norm(x, weight.shape, weight, bias, self.epsilon).to(self.weight.dtype)


class RMSNorm(nn.Module):
    """x -> x / sqrt(mean(x^2) + epsilon) * weight over the last dimension (arXiv:1910.07467)."""

    def __init__(self, width: int, epsilon: float, tp: TensorParallel, partial: bool | None = None):
        super().__init__()
        self.epsilon = epsilon
        self.weight = tp.replicated((width,), Constant(1.0), partial=partial)

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight.to(x.dtype)
        return functional.rms_norm(x, weight.shape, weight, self.epsilon).to(self.weight.dtype)


_NORMS = {"LayerNorm": LayerNorm, "RMSNorm": RMSNorm}


def make_norm(
    config: TransformerConfig, context: LayerContext, *, width: int | None = None, partial: bool | None = None
) -> nn.Module:
    """The norm of --normalization, over the residual stream or another width."""
    return _NORMS[config.normalization](width or config.hidden_size, config.norm_epsilon, context.tp, partial)
