"""One transformer layer."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import Tensor, nn

from megatron.core.base.lazy_imports import lazy_names
from megatron.core.base.unsupported_arguments import takes
from megatron.core.ops.attention.kv_cache import KeyValueCache
from megatron.core.ops.compile.compiled_region import compiles
from megatron.core.ops.dropout import HiddenDropout
from megatron.core.ops.fused_layer_ops import REGIONS
from megatron.core.parallel.global_state import current
from megatron.core.pipeline_parallel.layer_split import split_layers
from megatron.core.transformer.attention import ParallelAttention
from megatron.core.transformer.bias_dropout_add import get_bias_dropout_add
from megatron.core.transformer.compiled_layer import WholeLayer
from megatron.core.transformer.identity_op import IdentityFuncOp, IdentityOp
from megatron.core.transformer.layer_build_context import LayerContext, MakePart
from megatron.core.transformer.mlp import ParallelMLP
from megatron.core.transformer.model_config import ModelConfig
from megatron.core.transformer.module import MegatronModule, context_of, settings_of
from megatron.core.transformer.norm import Norm, make_norm
from megatron.core.transformer.recompute import give_up, recomputed
from megatron.core.transformer.spec_utils import _is_own, build_module


class ParallelTransformerLayer(nn.Module):
    """x -> x + drop(attention(norm(x))), then x + drop(mlp(norm(x))); other `--norm-placement` have other norms.

    The sums have the dtype of x, the blocks that of their weights: with `--fp32-residual-connection` x is float32.
    `layer` counts from 0 over the whole model. `make_attention` and `make_mlp` build the two blocks; a model passes
    its own with `make_layer=partial(ParallelTransformerLayer, make_mlp=OwnMLP)`.

    forward(x [s, b, h] ([s/t, b, h] under sequence parallelism), mask, angles, cache) -> the shape of x. Per forward:
    two all-reduces of [s, b, h] over tp; under sequence parallelism two all-gathers and two reduce-scatters.
    """

    gives_hidden_states = True  # for --inspect: forward returns [s, b, h], or [s/t, b, h] under sequence parallelism

    def __init__(
        self,
        config: ModelConfig,
        layer: int,
        context: LayerContext,
        *,
        make_attention: MakePart = ParallelAttention,
        make_mlp: MakePart = ParallelMLP,
    ):
        super().__init__()

        def norm(name: str) -> nn.Module | None:
            return make_norm(config, context) if name in config.layer_norms else None

        self.input_layernorm = norm("input_layernorm")
        self.self_attention = make_attention(config, layer, context)
        self.attention_dropout = context.hidden_dropout(config.hidden_dropout, "after attention", layer)
        self.post_self_attn_layernorm = norm("post_self_attn_layernorm")
        self.pre_mlp_layernorm = norm("pre_mlp_layernorm")
        self.mlp = make_mlp(config, layer, context)
        self.post_mlp_layernorm = norm("post_mlp_layernorm")
        self.placement, self.multiplier = config.norm_placement, config.residual_multiplier
        self.adds_to_normed = config.apply_residual_connection_post_layernorm
        self.keys, self.compiled = context.keys, compiles(config, context.tp.device)
        self.recomputes_mlp, self.recomputes_norms = config.recomputes("mlp"), config.recomputes("layernorm")
        self.mlp_dropout = context.hidden_dropout(config.hidden_dropout, "after mlp", layer)
        self.compiled_whole = (
            WholeLayer(self, config, context.tp) if self.compiled and config.compile == "layers" else None
        )

    def forward(
        self, x: Tensor, mask: Tensor | None = None, angles: Tensor | None = None, cache: KeyValueCache | None = None
    ) -> Tensor:
        if self.compiled_whole is not None and self.compiled_whole.takes(cache):
            x, fused = self.compiled_whole.before(x)
            heads = self.self_attention.heads_of(fused, None, angles)
            return self.compiled_whole.after(x, self.self_attention.of_heads(heads, mask))
        attend = lambda normed: self.self_attention(normed, mask, angles, cache)  # noqa: E731
        mlp = partial(recomputed, self.mlp, self.keys) if self.recomputes_mlp else self.mlp
        if self.placement in ("parallel", "parallel-one-norm"):
            return self._side_by_side(x, attend, mlp)
        x, out = self._of_norm(self.input_layernorm, x, attend)
        x = self._sum(x, out, self.attention_dropout, self.post_self_attn_layernorm)
        x, out = self._of_norm(self.pre_mlp_layernorm, x, mlp)
        return self._sum(x, out, self.mlp_dropout, self.post_mlp_layernorm)

    def _side_by_side(self, x: Tensor, attend: Callable[[Tensor], Tensor], mlp: Callable[[Tensor], Tensor]) -> Tensor:
        if self.pre_mlp_layernorm is None:
            x, normed = _normed(self.input_layernorm, x)
            attended, out = attend(normed), mlp(normed)
        else:
            x, attended = self._of_norm(self.input_layernorm, x, attend)
            x, out = self._of_norm(self.pre_mlp_layernorm, x, mlp)
        return self._sum(self._sum(x, attended, self.attention_dropout), out, self.mlp_dropout)

    def _sum(self, x: Tensor, out: Tensor, dropout: nn.Module, norm: nn.Module | None = None) -> Tensor:
        """x + drop(out); norm: of the result, or before that of `out`."""
        if norm is not None and self.placement == "post":
            return norm(self._sum(x, out, dropout))
        out = out if norm is None else norm(out)
        out = out if self.multiplier == 1 else out * self.multiplier
        if not (self.compiled and isinstance(dropout, HiddenDropout) and dropout.is_active):
            return x + dropout(out)
        return REGIONS["residual"].compiled(x, out, *dropout.words_for(out), dropout.probability, out.dtype)

    def _of_norm(self, norm: nn.Module | None, x: Tensor, block: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
        """(x, block(norm(x)))"""
        if norm is None:
            return x, block(x)
        x, normed = _normed(norm, x)
        result = block(normed)
        if self.adds_to_normed:
            return normed, result
        if self.recomputes_norms and result.requires_grad:
            give_up(normed, partial(norm, x), until=result)
        return x, result


def _normed(norm: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    """(x, norm(x)); a compiled norm adds the gradients of both in its own pass."""
    return norm(x, beside_input=True) if isinstance(norm, Norm) and norm.carries else (x, norm(x))


def layers_of_stage(config: Any, num_layers: int | None = None) -> range:
    """The layers, from 0 over the whole model, of the stage that is being built. num_layers: of the model, else the
    config's."""
    here = current()
    stages = here.mesh.stages
    layers = split_layers(
        num_layers or config.num_layers,
        len(stages.ranks),
        stages=stages,
        first=getattr(config, "num_layers_in_first_pipeline_stage", None),
        last=getattr(config, "num_layers_in_last_pipeline_stage", None),
        embedding_as_layer=getattr(config, "account_for_embedding_in_pipeline_split", False),
        loss_as_layer=getattr(config, "account_for_loss_in_pipeline_split", False),
    )
    return layers[stages.of_rank(here.mesh["pp"].rank)[here.virtual_rank or 0]]


@dataclass
class TransformerLayerSubmodules:
    input_layernorm: Any = IdentityOp
    self_attention: Any = IdentityOp
    self_attn_bda: Any = IdentityFuncOp
    pre_cross_attn_layernorm: Any = IdentityOp
    cross_attention: Any = IdentityOp
    cross_attn_bda: Any = IdentityFuncOp
    pre_mlp_layernorm: Any = IdentityOp
    mlp: Any = IdentityOp
    mlp_bda: Any = IdentityFuncOp
    sharded_state_dict_keys_map: dict[str, str] = field(default_factory=dict)


class TransformerLayer(MegatronModule):
    """x + drop(attention(norm(x))), then x + drop(mlp(norm(x))), of the parts in `submodules`.

    layer_number: from 1, within the stage. forward(hidden_states [s, b, h], attention_mask, rotary_pos_emb=) -> (hidden
    states, context). Norms that a part holds itself, as Transformer Engine's do, are IdentityOp here.
    """

    @takes(pg_collection=None, vp_stage=None)
    def __init__(
        self,
        config: Any,
        submodules: TransformerLayerSubmodules,
        layer_number: int = 1,
        hidden_dropout: float | None = None,
    ):
        super().__init__(config)
        self.submodules_config, self.layer_number = submodules, layer_number + self._get_layer_offset()
        self.hidden_dropout = config.hidden_dropout if hidden_dropout is None else hidden_dropout
        of_norm = {"config": config, "hidden_size": config.hidden_size, "eps": config.layernorm_epsilon}
        self.input_layernorm = build_module(submodules.input_layernorm, **of_norm)
        number = self.layer_number
        self.self_attention = build_module(submodules.self_attention, config=config, layer_number=number)
        self.self_attn_bda = build_module(submodules.self_attn_bda)
        self.pre_mlp_layernorm = build_module(submodules.pre_mlp_layernorm, **of_norm)
        self.mlp = build_module(submodules.mlp, config=config)
        self.mlp_bda = build_module(submodules.mlp_bda)
        context = context_of(settings_of(config), config)
        self.attention_dropout = context.hidden_dropout(self.hidden_dropout, "after attention", number - 1)
        self.mlp_dropout = context.hidden_dropout(self.hidden_dropout, "after mlp", number - 1)
        self.cross_attention: Any = None
        if _is_own(submodules.cross_attention):
            self.pre_cross_attn_layernorm = build_module(submodules.pre_cross_attn_layernorm, **of_norm)
            self.cross_attention = build_module(submodules.cross_attention, config=config, layer_number=number)
            self.cross_attn_bda = build_module(submodules.cross_attn_bda)
            self.cross_dropout = context.hidden_dropout(self.hidden_dropout, "after cross attention", number - 1)

    def _get_layer_offset(self) -> int:
        """The layers of earlier stages."""
        return layers_of_stage(self.config).start

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Any = None,
        context: Any = None,
        context_mask: Any = None,
        rotary_pos_emb: Tensor | None = None,
        inference_params: None = None,
        packed_seq_params: None = None,
    ) -> tuple[Tensor, Any]:
        if inference_params is not None or packed_seq_params is not None:
            raise NotImplementedError("inference_params and packed_seq_params are not built yet; leave them out")
        rotary = {} if rotary_pos_emb is None else {"rotary_pos_emb": rotary_pos_emb}
        x = hidden_states
        out = self.self_attention(self.input_layernorm(x), attention_mask=attention_mask, **rotary)
        x = self._added(self.self_attn_bda, out, x, self.attention_dropout)
        if self.cross_attention is not None:
            y = self.pre_cross_attn_layernorm(x)
            out = self.cross_attention(y, attention_mask=context_mask, key_value_states=context)
            x = self._added(self.cross_attn_bda, out, x, self.cross_dropout)
        out = self.mlp(self.pre_mlp_layernorm(x))
        return self._added(self.mlp_bda, out, x, self.mlp_dropout), context

    def _added(self, bda: Any, out: Any, residual: Tensor, dropout: nn.Module) -> Tensor:
        """residual + dropout(out + bias), or what a user's `bda` makes of them."""
        if bda is not get_bias_dropout_add:
            return bda(self.training, self.config.bias_dropout_fusion)(out, residual, self.hidden_dropout)
        x, bias = out if isinstance(out, tuple) else (out, None)
        return residual + dropout(x if bias is None else x + bias)


# Megatron's names.
__getattr__, __dir__ = lazy_names(__name__, {})
