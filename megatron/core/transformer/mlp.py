"""The MLP of a layer: a column-parallel linear layer, the activation, a row-parallel linear layer."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from megatron.core.base.lazy_imports import lazy_names
from megatron.core.base.unsupported_arguments import accepts_defaults_only
from megatron.core.ops.compile.compiled_region import compiles
from megatron.core.ops.count_flops_by_module import Flops, LayerInput, children_flops
from megatron.core.ops.fused_layer_ops import activation_of
from megatron.core.process_groups_config import OWN_TP_GROUP
from megatron.core.tensor_parallel.linear_layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.layer_parallel_context import LayerContext
from megatron.core.transformer.model_config import ModelConfig
from megatron.core.transformer.module import of_process
from megatron.core.transformer.spec_utils import build_module, is_custom_part
from megatron.core.transformer.tiled_compute import declare_tiled_use, run_tiled


class ParallelMLP(nn.Module):
    """Compute W2 f(W1 x), or gated: W2 (f(Wg x) * (Wu x)) with Wg and Wu fused as [gate | up] (arXiv:2002.05202).

    W1 is sharded by columns and W2 by rows over tp. f: `--activation`, silu with `--swiglu`.
    forward(x [s, b, h] ([s/t, b, h] under sequence parallelism)) -> the same shape. Every rank of tp must call.
    """

    gives_hidden_states = True  # for --inspect: forward returns [s, b, h], or [s/t, b, h] under sequence parallelism

    def __init__(self, config: ModelConfig, layer: int, context: LayerContext):
        super().__init__()
        del layer  # all layers have the same MLP
        self.tiles = config.tiled_mlp
        self.keys = context.keys
        ffn_size = config.ffn_size
        tp = context.tp
        activation = activation_of(
            config.activation_region, config.activation_func_clamp_value, config.glu_linear_offset
        )
        self.activation = activation.select(config, tp.device)
        self.linear_fc1 = ColumnParallelLinear(
            config.hidden_size,
            2 * ffn_size if config.is_gated else ffn_size,
            tp=tp,
            init=config.init,
            bias=config.has_mlp_bias,
            skip_bias_add=compiles(config, tp.device),  # a compiled activation adds it
            blocks=(ffn_size, ffn_size) if config.is_gated else (),
        )
        self.linear_fc2 = RowParallelLinear(
            ffn_size, config.hidden_size, tp=tp, init=config.output_init, bias=config.has_mlp_bias
        )
        declare_tiled_use(self.linear_fc1.weight, self.tiles)
        declare_tiled_use(self.linear_fc2.weight, self.tiles)

    def forward(self, x: Tensor) -> Tensor:
        if self.tiles == 1:
            return self.linear_fc2(self.activations(x))[0]
        return run_tiled(lambda tile: self.linear_fc2(self.activations(tile))[0], self.tiles, self.keys, x)

    def activations(self, x: Tensor) -> Tensor:
        """Return the activations [s, b, ffn/t] before the output projection. Every rank of tp must call.

        x: [s, b, h] ([s/t, b, h] under sequence parallelism).
        """
        return self.activation(*self.linear_fc1(x))

    def count_flops(self, x: LayerInput) -> Flops:
        flops = children_flops(self, x)
        return flops.recomputed() if self.tiles > 1 else flops


@accepts_defaults_only(activation_func=None)
@dataclass
class MLPSubmodules:
    """The parts of an `MLP`: classes, or specs of them."""

    linear_fc1: Any = None
    linear_fc2: Any = None


class MLP(ParallelMLP):
    """The MLP with Megatron's arguments, of the parts in `submodules`.

    forward(hidden_states [s, b, h] ([s/t, b, h] under sequence parallelism)) -> (output, of the same shape, bias [h] or
    None). Every rank of tp must call. Building it raises NotImplementedError for is_expert and another input_size.
    """

    @accepts_defaults_only("input_size", ffn_hidden_size=None, tp_group=OWN_TP_GROUP)
    def __init__(
        self,
        config: Any,
        submodules: MLPSubmodules,
        is_expert: bool = False,
        input_size: int | None = None,
        *,
        layer_context: LayerContext | None = None,
        settings: ModelConfig | None = None,
    ):
        if is_expert or input_size not in (None, config.hidden_size):
            raise NotImplementedError(
                "MLP: is_expert, and an input_size other than hidden_size, are not supported yet; leave them out"
            )
        model_config, place = of_process(config, layer_context, settings)
        super().__init__(model_config, 0, place)
        self.config = config
        self.linear_fc2.skip_bias_add = True

        # a script's own parts take the place of ours
        hidden_size = model_config.hidden_size
        ffn_size = model_config.ffn_size
        options = {"config": config, "bias": config.add_bias_linear, "skip_bias_add": True, "is_expert": False}
        if is_custom_part(submodules.linear_fc1, ColumnParallelLinear):
            self.linear_fc1 = build_module(
                submodules.linear_fc1,
                hidden_size,
                2 * ffn_size if model_config.is_gated else ffn_size,
                init_method=config.init_method,
                gather_output=False,
                tp_comm_buffer_name="fc1",
                **options,
            )
        if is_custom_part(submodules.linear_fc2, RowParallelLinear):
            self.linear_fc2 = build_module(
                submodules.linear_fc2,
                ffn_size,
                hidden_size,
                init_method=config.output_layer_init_method,
                input_is_parallel=True,
                tp_comm_buffer_name="fc2",
                **options,
            )

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor | None]:
        return self.linear_fc2(self.activations(hidden_states))


# Megatron's names.
__getattr__, __dir__ = lazy_names(__name__, {})
