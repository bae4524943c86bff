"""The MLP of a layer: column-parallel, activation, row-parallel."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from megatron.core.base.lazy_imports import lazy_names
from megatron.core.base.unsupported_arguments import takes
from megatron.core.ops.compile.compiled_region import compiles
from megatron.core.ops.fused_layer_ops import activation_of
from megatron.core.tensor_parallel import linear_layers
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.layer_build_context import LayerContext
from megatron.core.transformer.model_config import ModelConfig
from megatron.core.transformer.module import context_of, settings_of
from megatron.core.transformer.spec_utils import _is_own, build_module
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
        self.linear_fc1 = linear_layers.ColumnParallelLinear(
            config.hidden_size,
            2 * f if config.is_gated else f,
            tp=tp,
            init=config.init,
            bias=config.has_mlp_bias,
            skip_bias_add=compiles(config, tp.device),  # a compiled activation adds it
            blocks=(f, f) if config.is_gated else (),
        )
        self.linear_fc2 = linear_layers.RowParallelLinear(
            f, config.hidden_size, tp=tp, init=config.output_init, bias=config.has_mlp_bias
        )
        for linear in (self.linear_fc1, self.linear_fc2):
            declare_tiles(linear.weight, self.tiles)

    def forward(self, x: Tensor) -> Tensor:
        return in_tiles(lambda part: self.linear_fc2(self.inner(part))[0], self.tiles, self.keys, x)

    def inner(self, x: Tensor) -> Tensor:
        """[s, b, f/t]: activations, before the output layer."""
        return self.activation(*self.linear_fc1(x))


@takes(activation_func=None)
@dataclass
class MLPSubmodules:
    linear_fc1: Any = None
    linear_fc2: Any = None


class MLP(ParallelMLP):
    """forward(hidden_states [s, b, h]) -> (output [s, b, h], bias or None)"""

    @takes(ffn_hidden_size=None, tp_group=None)
    def __init__(self, config: Any, submodules: MLPSubmodules, is_expert: bool = False, input_size: int | None = None):
        if is_expert or input_size not in (None, config.hidden_size):
            raise NotImplementedError("MLP: is_expert and another input_size are not built yet; leave them out")
        ours = settings_of(config)
        super().__init__(ours, 0, context_of(ours, config))
        self.config = config
        h, f = ours.hidden_size, ours.ffn_size
        options = {"config": config, "bias": config.add_bias_linear, "skip_bias_add": True, "is_expert": False}
        if _is_own(submodules.linear_fc1, ColumnParallelLinear):
            of_one = {"init_method": config.init_method, "gather_output": False, "tp_comm_buffer_name": "fc1"}
            self.linear_fc1 = build_module(submodules.linear_fc1, h, f * (1 + ours.is_gated), **options, **of_one)
        self.linear_fc2.skip_bias_add = True
        if _is_own(submodules.linear_fc2, RowParallelLinear):
            of_two = {"init_method": config.output_layer_init_method, "input_is_parallel": True}
            of_two |= {"tp_comm_buffer_name": "fc2"}
            self.linear_fc2 = build_module(submodules.linear_fc2, f, h, **options, **of_two)

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor | None]:
        return self.linear_fc2(self.inner(hidden_states))


# Megatron's names.
__getattr__, __dir__ = lazy_names(__name__, {})
