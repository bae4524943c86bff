"""The MLP of a layer: column-parallel, activation, row-parallel."""

from torch import Tensor, nn

from megatron.core.base.lazy_imports import lazy_names
from megatron.core.ops.compile.compiled_region import compiles
from megatron.core.ops.fused_layer_ops import activation_of
from megatron.core.tensor_parallel.linear_layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.layer_context import LayerContext
from megatron.core.transformer.model_config import ModelConfig
from megatron.core.transformer.tiled_compute import declare_tiles, in_tiles


class ParallelMLP(nn.Module):
    """x -> W2 f(W1 x), or gated: W2 (f(Wg x) * (Wu x)) with Wg and Wu fused as [gate | up] (arXiv:2002.05202).

    f: `--activation`, silu with `--swiglu`.

    forward(x [s, b, h] ([s/t, b, h] under sequence parallelism)) -> the same shape.
    """

    gives_hidden_states = True  # for --inspect: forward returns [s, b, h], or [s/t, b, h] under sequence parallelism

    def __init__(self, config: ModelConfig, layer: int, context: LayerContext):
        super().__init__()
        del layer  # all layers have the same MLP
        self.tiles, self.keys = config.tiled_mlp, context.keys
        f, tp = config.ffn_size, context.tp
        self.activation = activation_of(
            config.activation_region, config.activation_func_clamp_value, config.glu_linear_offset
        ).chosen(config, tp.device)
        self.linear_fc1 = ColumnParallelLinear(
            config.hidden_size,
            2 * f if config.is_gated else f,
            tp=tp,
            init=config.init,
            bias=config.has_mlp_bias,
            skip_bias_add=compiles(config, tp.device),  # a compiled activation adds it
            blocks=(f, f) if config.is_gated else (),
        )
        self.linear_fc2 = RowParallelLinear(
            f, config.hidden_size, tp=tp, init=config.output_init, bias=config.has_mlp_bias
        )
        for linear in (self.linear_fc1, self.linear_fc2):
            declare_tiles(linear.weight, self.tiles)

    def forward(self, x: Tensor) -> Tensor:
        return in_tiles(lambda part: self.linear_fc2(self.inner(part))[0], self.tiles, self.keys, x)

    def inner(self, x: Tensor) -> Tensor:
        """[s, b, f/t]: activations, before the output layer."""
        return self.activation(*self.linear_fc1(x))


# Megatron's names.
__getattr__, __dir__ = lazy_names(__name__, {"megatron.core.classic.layers": "MLP MLPSubmodules"})
