"""Normalization of the residual stream or of heads.

Under sequence parallelism a rank normalizes its part of the sequence.

A norm computes in the dtype of its input, so a float32 residual stream loses no precision, and returns the dtype of its
weight. `partial`: whether a rank's gradient of the weight is partial; None: it is under sequence parallelism.
"""

from torch import Tensor, nn

from megatron.core.ops.compile.compiled_region import compiles
from megatron.core.ops.fused_layer_ops import REGIONS
from megatron.core.ops.recomputable_tensors import unmark_recomputable
from megatron.core.sharding.placement import Constant
from megatron.core.transformer.layer_parallel_context import LayerContext
from megatron.core.transformer.model_config import ModelConfig


class Norm(nn.Module):
    """Compute norm(x) * weight (+ bias) over the last dimension, as `--normalization` says.

    LayerNorm: norm(x) = (x - mean) / sqrt(var + epsilon), with a bias. RMSNorm: norm(x) = x / sqrt(mean(x^2) + epsilon)
    (arXiv:1910.07467), without one. With `apply_layernorm_1p` the factor is 1 + weight. Weight and bias: [width].
    """

    def __init__(self, config: ModelConfig, context: LayerContext, width: int, partial: bool | None = None):
        super().__init__()
        tp = context.tp
        has_bias = config.normalization == "LayerNorm" and config.norm_bias
        initial_weight = Constant(0.0 if config.apply_layernorm_1p else 1.0)
        self.epsilon = config.norm_epsilon
        self.weight = tp.replicated((width,), initial_weight, partial=partial)
        self.bias = tp.replicated((width,), Constant(0.0), partial=partial) if has_bias else None
        self.region = REGIONS[config.norm_region].select(config, tp.device)
        self.returns_residual = compiles(config, tp.device)  # the compiled op adds the gradients of x and norm(x)

    def forward(self, x: Tensor, *, with_input: bool = False) -> Tensor | tuple[Tensor, Tensor]:
        """Return norm(x), or (x, norm(x)) with `with_input`. x: [.., width]; results have its shape.

        With `with_input` a compiled norm adds the gradients of both results in its own backward pass, and linear layers
        that read norm(x) recompute it instead of saving it. They must be of the same layer.
        """
        x, normed = self.region(x, self.weight, self.bias, self.epsilon)
        return (x, normed) if with_input else unmark_recomputable(normed)


def make_norm(
    config: ModelConfig, context: LayerContext, *, width: int | None = None, partial: bool | None = None
) -> nn.Module:
    """Return the norm of `--normalization`. width: of its input; default: the hidden size."""
    return Norm(config, context, width or config.hidden_size, partial)
