"""Normalization of the residual stream, or of heads. Under sequence parallelism a rank normalizes its part of the
sequence.

The computation has the dtype of the input, so a float32 residual stream loses no precision; the result has the dtype
of the weight. `partial`: whether a rank's gradient is partial; None: under sequence parallelism.
"""

from torch import Tensor, nn

from megatron.core.ops.compile.compiled_region import compiles
from megatron.core.ops.fused_layer_ops import REGIONS
from megatron.core.ops.rematerialize import unmarked
from megatron.core.sharding.placement import Constant
from megatron.core.transformer.layer_build_context import LayerContext
from megatron.core.transformer.model_config import ModelConfig


class Norm(nn.Module):
    """x -> norm(x) * weight (+ bias) over the last dimension, by the region of its name:

    LayerNorm: norm(x) = (x - mean) / sqrt(var + epsilon), with a bias; RMSNorm: x / sqrt(mean(x^2) + epsilon)
    (arXiv:1910.07467), without. With `apply_layernorm_1p` times 1 + weight.
    """

    def __init__(self, config: ModelConfig, context: LayerContext, width: int, partial: bool | None = None):
        super().__init__()
        name, tp = config.norm_region, context.tp
        has_bias = config.normalization == "LayerNorm" and config.norm_bias
        self.epsilon = config.norm_epsilon
        start = Constant(0.0 if config.apply_layernorm_1p else 1.0)
        self.weight = tp.replicated((width,), start, partial=partial)
        self.bias = tp.replicated((width,), Constant(0.0), partial=partial) if has_bias else None
        self.region, self.carries = REGIONS[name].chosen(config, tp.device), compiles(config, tp.device)

    def forward(self, x: Tensor, *, beside_input: bool = False) -> Tensor | tuple[Tensor, Tensor]:
        """norm(x). beside_input: (x, norm(x)); one that `carries` adds the gradients of both in its own pass, and the
        products
        of norm(x), which must be of the same layer, make it again."""
        both = self.region(x, self.weight, self.bias, self.epsilon)
        return both if beside_input else unmarked(both[1])


def make_norm(
    config: ModelConfig, context: LayerContext, *, width: int | None = None, partial: bool | None = None
) -> nn.Module:
    """The norm of --normalization, over the residual stream or another width."""
    return Norm(config, context, width or config.hidden_size, partial)
