"""One transformer layer: ours, and Megatron's `TransformerLayer` built from a spec."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import Tensor, nn

from megatron.core.base.lazy_imports import lazy_names
from megatron.core.base.unsupported_arguments import accepts_defaults_only
from megatron.core.ops.attention.kv_cache import AttentionCache
from megatron.core.ops.compile.compiled_region import compiles
from megatron.core.ops.dropout import HiddenDropout
from megatron.core.ops.fused_layer_ops import REGIONS
from megatron.core.parallel.global_state import get_global_state
from megatron.core.pipeline_parallel.layer_split import split_layers
from megatron.core.transformer.attention import ParallelAttention
from megatron.core.transformer.bias_dropout_add import get_bias_dropout_add
from megatron.core.transformer.compiled_layer import WholeLayerPrograms
from megatron.core.transformer.identity_op import IdentityFuncOp, IdentityOp
from megatron.core.transformer.layer_build_context import LayerContext, MakePart
from megatron.core.transformer.mlp import ParallelMLP
from megatron.core.transformer.model_config import ModelConfig
from megatron.core.transformer.module import MegatronModule, context_of, settings_of
from megatron.core.transformer.norm import Norm, make_norm
from megatron.core.transformer.recompute import discard_and_recompute, recompute_in_backward
from megatron.core.transformer.spec_utils import build_module, is_custom_part


class ParallelTransformerLayer(nn.Module):
    """Compute x + dropout(attention(norm(x))), then x + dropout(mlp(norm(x))); `--norm-placement` moves the norms.

    The residual stream keeps the dtype of x, the blocks compute in that of their weights: with
    `--fp32-residual-connection` x is float32. `layer` counts from 0 over the whole model. `make_attention`
    and `make_mlp` build the two blocks; a model passes its own:
    `make_layer=partial(ParallelTransformerLayer, make_mlp=OwnMLP)`.

    forward(x [s, b, h] ([s/t, b, h] under sequence parallelism), mask, angles, cache) -> the shape of x. mask, angles,
    cache: see `ParallelAttention`. Every rank of tp must call. A forward costs two all-reduces of [s, b, h] over tp;
    under sequence parallelism two all-gathers and two reduce-scatters.
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

        # The parts, in the order of the forward. Their names are the parameters' names.
        self.input_layernorm = norm("input_layernorm")
        self.self_attention = make_attention(config, layer, context)
        self.attention_dropout = context.hidden_dropout(config.hidden_dropout, "after attention", layer)
        self.post_self_attn_layernorm = norm("post_self_attn_layernorm")
        self.pre_mlp_layernorm = norm("pre_mlp_layernorm")
        self.mlp = make_mlp(config, layer, context)
        self.post_mlp_layernorm = norm("post_mlp_layernorm")
        self.mlp_dropout = context.hidden_dropout(config.hidden_dropout, "after mlp", layer)

        self.norm_placement = config.norm_placement
        self.residual_multiplier = config.residual_multiplier
        self.apply_residual_connection_post_layernorm = config.apply_residual_connection_post_layernorm
        self.recomputes_mlp = config.recomputes("mlp")
        self.recomputes_norms = config.recomputes("layernorm")
        self.keys = context.keys
        self.compiled = compiles(config, context.tp.device)
        self.compiled_layer = None
        if self.compiled and config.compile == "layers":
            self.compiled_layer = WholeLayerPrograms(self, config, context.tp)

    def forward(
        self, x: Tensor, mask: Tensor | None = None, angles: Tensor | None = None, cache: AttentionCache | None = None
    ) -> Tensor:
        # --compile layers: two compiled programs, and between them the attention kernel
        if self.compiled_layer is not None and self.compiled_layer.can_run(cache):
            x, mixed_qkv = self.compiled_layer.before_attention(x)  # [s, b, h], [s, b, (n + 2 groups) d]
            heads = self.self_attention.get_query_key_value_tensors(mixed_qkv, None, angles)
            core_attn_out = self.self_attention.attend(heads, mask)  # [s, b, n d]
            return self.compiled_layer.after_attention(x, core_attn_out)

        def attention(normed: Tensor) -> Tensor:
            return self.self_attention(normed, mask, angles, cache)

        # parallel residual (GPT-J, GPT-NeoX): both blocks read x, and both results are added to it
        if self.norm_placement in ("parallel", "parallel-one-norm"):
            if self.pre_mlp_layernorm is None:
                x, normed = _residual_and_norm(self.input_layernorm, x)
                attention_out = attention(normed)
                mlp_out = self._run_mlp(normed)
            else:
                x, attention_out = self._norm_then(self.input_layernorm, x, attention)
                x, mlp_out = self._norm_then(self.pre_mlp_layernorm, x, self._run_mlp)
            x = self._add_residual(x, attention_out, self.attention_dropout)
            return self._add_residual(x, mlp_out, self.mlp_dropout)

        # x + dropout(attention(norm(x)))
        x, out = self._norm_then(self.input_layernorm, x, attention)
        x = self._add_residual(x, out, self.attention_dropout, self.post_self_attn_layernorm)

        # x + dropout(mlp(norm(x)))
        x, out = self._norm_then(self.pre_mlp_layernorm, x, self._run_mlp)
        return self._add_residual(x, out, self.mlp_dropout, self.post_mlp_layernorm)

    def _run_mlp(self, normed: Tensor) -> Tensor:
        """Run the MLP on [s, b, h] ([s/t, b, h] under sequence parallelism), to the same shape.

        With `--recompute-modules mlp` the backward computes its activations again.
        """
        if self.recomputes_mlp:
            return recompute_in_backward(self.mlp, self.keys, normed, modules=[self.mlp])
        return self.mlp(normed)

    def _norm_then(self, norm: nn.Module | None, x: Tensor, block: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
        """Return (residual, block(norm(x))), both in the shape of x.

        The residual is x, or norm(x) where the config adds to the norm's output.
        """
        if norm is None:
            return x, block(x)
        x, normed = _residual_and_norm(norm, x)
        out = block(normed)
        if self.apply_residual_connection_post_layernorm:
            return normed, out
        if self.recomputes_norms and out.requires_grad:
            discard_and_recompute(normed, partial(norm, x), until=out)
        return x, out

    def _add_residual(self, residual: Tensor, out: Tensor, dropout: nn.Module, norm: nn.Module | None = None) -> Tensor:
        """Return residual + dropout(out), all of one shape.

        norm: of the sum with `--norm-placement post`, else of `out` before the sum.
        """
        normalizes_sum = norm is not None and self.norm_placement == "post"
        if norm is not None and not normalizes_sum:
            out = norm(out)
        if self.residual_multiplier != 1:
            out = out * self.residual_multiplier
        if self.compiled and isinstance(dropout, HiddenDropout) and dropout.is_active:
            words = dropout.words_for(out)
            x = REGIONS["residual"].compiled(residual, out, *words, dropout.probability, out.dtype)
        else:
            x = residual + dropout(out)
        return norm(x) if normalizes_sum else x


def _residual_and_norm(norm: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return (x, norm(x)), both in the shape of x.

    A compiled norm returns x as well: its backward adds the gradients of both in one pass.
    """
    if isinstance(norm, Norm) and norm.returns_residual:
        return norm(x, with_input=True)
    return x, norm(x)


def layers_of_stage(config: Any, num_layers: int | None = None) -> range:
    """Return the layers of the pipeline stage that is being built, numbered from 0 over the whole model.

    num_layers: of the whole model; default: the config's.
    """
    state = get_global_state()
    stages = state.mesh.stages
    layers = split_layers(
        num_layers or config.num_layers,
        len(stages.ranks),
        stages=stages,
        first=getattr(config, "num_layers_in_first_pipeline_stage", None),
        last=getattr(config, "num_layers_in_last_pipeline_stage", None),
        embedding_as_layer=getattr(config, "account_for_embedding_in_pipeline_split", False),
        loss_as_layer=getattr(config, "account_for_loss_in_pipeline_split", False),
    )
    stages_of_rank = stages.of_rank(state.mesh["pp"].rank)  # one for each virtual stage
    return layers[stages_of_rank[state.virtual_rank or 0]]


@dataclass
class TransformerLayerSubmodules:
    """The parts of a `TransformerLayer`: classes, functions, or specs of them."""

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
    """Compute x + dropout(attention(norm(x))), then x + dropout(mlp(norm(x))), with the parts in `submodules`.

    With `cross_attention` among them, attention to another sequence is between the two. layer_number: from 1, within
    the stage. A part that holds its own norm, as Transformer Engine's do, has IdentityOp for a norm here.

    forward(hidden_states [s, b, h] ([s/t, b, h] under sequence parallelism), attention_mask [b or 1, 1, s, s], context
    [m, b, h], context_mask [.., s or 1, m], rotary_pos_emb [s, 1, 1, width]) -> (hidden states of the same shape,
    context). Masks are True where masked. Every rank of tp must call. Raises NotImplementedError for inference_params
    and packed_seq_params. Megatron's file: megatron/core/transformer/transformer_layer.py.
    """

    @accepts_defaults_only(pg_collection=None, vp_stage=None)
    def __init__(
        self,
        config: Any,
        submodules: TransformerLayerSubmodules,
        layer_number: int = 1,
        hidden_dropout: float | None = None,
    ):
        super().__init__(config)
        self.submodules_config = submodules
        self.layer_number = layer_number + self._get_layer_offset()
        self.hidden_dropout = config.hidden_dropout if hidden_dropout is None else hidden_dropout
        number = self.layer_number
        norm_options = {"config": config, "hidden_size": config.hidden_size, "eps": config.layernorm_epsilon}

        # self-attention
        self.input_layernorm = build_module(submodules.input_layernorm, **norm_options)
        self.self_attention = build_module(submodules.self_attention, config=config, layer_number=number)
        self.self_attn_bda = build_module(submodules.self_attn_bda)

        # MLP
        self.pre_mlp_layernorm = build_module(submodules.pre_mlp_layernorm, **norm_options)
        self.mlp = build_module(submodules.mlp, config=config)
        self.mlp_bda = build_module(submodules.mlp_bda)

        layer_context = context_of(settings_of(config), config)
        self.attention_dropout = layer_context.hidden_dropout(self.hidden_dropout, "after attention", number - 1)
        self.mlp_dropout = layer_context.hidden_dropout(self.hidden_dropout, "after mlp", number - 1)

        # cross-attention, in a decoder's layer
        self.cross_attention: Any = None
        if is_custom_part(submodules.cross_attention):
            self.pre_cross_attn_layernorm = build_module(submodules.pre_cross_attn_layernorm, **norm_options)
            self.cross_attention = build_module(submodules.cross_attention, config=config, layer_number=number)
            self.cross_attn_bda = build_module(submodules.cross_attn_bda)
            self.cross_dropout = layer_context.hidden_dropout(self.hidden_dropout, "after cross attention", number - 1)

    def _get_layer_offset(self) -> int:
        """Return the number of layers in earlier stages."""
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
        # a script's attention without rotary positions need not take the argument
        rotary = {} if rotary_pos_emb is None else {"rotary_pos_emb": rotary_pos_emb}
        x = hidden_states

        # x + dropout(attention(norm(x)))
        out = self.self_attention(self.input_layernorm(x), attention_mask=attention_mask, **rotary)
        x = self._bias_dropout_add(self.self_attn_bda, out, x, self.attention_dropout)

        # x + dropout(cross attention(norm(x)))
        if self.cross_attention is not None:
            normed = self.pre_cross_attn_layernorm(x)
            out = self.cross_attention(normed, attention_mask=context_mask, key_value_states=context)
            x = self._bias_dropout_add(self.cross_attn_bda, out, x, self.cross_dropout)

        # x + dropout(mlp(norm(x)))
        out = self.mlp(self.pre_mlp_layernorm(x))
        x = self._bias_dropout_add(self.mlp_bda, out, x, self.mlp_dropout)
        return x, context

    def _bias_dropout_add(self, bda: Any, out_with_bias: Any, residual: Tensor, dropout: nn.Module) -> Tensor:
        """Return residual + dropout(out + bias), or the result of a script's own `bda`.

        Our `dropout` replaces that of `get_bias_dropout_add`: its masks are the same in every layout.
        """
        if bda is not get_bias_dropout_add:
            return bda(self.training, self.config.bias_dropout_fusion)(out_with_bias, residual, self.hidden_dropout)
        out, bias = out_with_bias if isinstance(out_with_bias, tuple) else (out_with_bias, None)
        if bias is not None:
            out = out + bias
        return residual + dropout(out)


# Megatron's names.
__getattr__, __dir__ = lazy_names(__name__, {})
