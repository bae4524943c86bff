"""One transformer layer: Megatron's `TransformerLayer`, and its classic name, `ParallelTransformerLayer`.

    s, b, h    sequence, batch, hidden; under sequence parallelism a rank has s/t rows
    m          tokens of the other sequence, to which cross-attention attends

`TransformerLayerSubmodules` names the layer's parts. Without it the parts are ours (`submodules_of`), with the norms
where `--norm-placement` has them.
"""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from megatron.core.base.lazy_imports import lazy_names
from megatron.core.base.unsupported_arguments import accepts_defaults_only
from megatron.core.ops.attention.document_and_window_masks import Documents, MaskWithBias
from megatron.core.ops.attention.kv_cache import AttentionCache, DecoderCache
from megatron.core.ops.compile.compiled_region import compiles
from megatron.core.ops.count_flops_by_module import Flops, LayerInput, flops_of, further_flops
from megatron.core.ops.fused_layer_ops import REGIONS
from megatron.core.ops.layout_invariant_dropout import HiddenDropout
from megatron.core.parallel.global_state import get_global_state
from megatron.core.pipeline_parallel.layer_split import split_by_layout, split_layers
from megatron.core.process_groups_config import OWN_GROUPS, OWN_GROUPS_BY_NAME
from megatron.core.transformer.activation_norm_placement_multiplier_config import NORM_PLACEMENTS
from megatron.core.transformer.attention import ParallelAttention
from megatron.core.transformer.bias_dropout_add import get_bias_dropout_add
from megatron.core.transformer.compile_before_and_after_attention import WholeLayerPrograms
from megatron.core.transformer.cross_attention import ParallelCrossAttention
from megatron.core.transformer.identity_op import IdentityFuncOp, IdentityOp
from megatron.core.transformer.layer_parallel_context import LayerContext, MakePart
from megatron.core.transformer.mlp import ParallelMLP
from megatron.core.transformer.model_config import ModelConfig
from megatron.core.transformer.module import MegatronModule, of_process
from megatron.core.transformer.moe.moe_layer import mlp_of_layer
from megatron.core.transformer.norm import Norm, make_norm
from megatron.core.transformer.recompute_without_rng_state import discard_and_recompute, recompute_in_backward
from megatron.core.transformer.spec_utils import ContextSpec, build_module, build_part, is_custom_part


@dataclass
class TransformerLayerSubmodules:
    """The parts of a `TransformerLayer`: classes, functions, or specs of them (`ModuleSpec`, `ContextSpec`).

    A part that is left out is an identity, which for a norm means that there is none. A part that holds its own norm,
    as Transformer Engine's do, has IdentityOp for a norm here.
    """

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
    # of a block's result, or with `--norm-placement post` of the sum with the residual
    _: KW_ONLY
    post_self_attn_layernorm: Any = IdentityOp
    post_mlp_layernorm: Any = IdentityOp


# Our parts. They are the same objects in all layers, so that two specs of ours are equal.
_NORM = ContextSpec(lambda config, layer, context: make_norm(config, context))
_SELF_ATTENTION = ContextSpec(ParallelAttention)
_MLP = ContextSpec(mlp_of_layer)
# numbered behind all layers, so that its dropout masks differ from those of the layer's self-attention
CROSS_ATTENTION = ContextSpec(
    lambda config, layer, context: ParallelCrossAttention(config, config.all_layers + layer, context)
)


def submodules_of(config: ModelConfig, *, cross_attention: bool = False) -> TransformerLayerSubmodules:
    """Return our parts of a layer, with the norms where `--norm-placement` has them.

    cross_attention: the layer also attends to another sequence, after a norm, as a decoder's does.
    """
    parts = TransformerLayerSubmodules(
        self_attention=_SELF_ATTENTION,
        self_attn_bda=get_bias_dropout_add,
        mlp=_MLP,
        mlp_bda=get_bias_dropout_add,
        **dict.fromkeys(config.layer_norms, _NORM),
    )
    if cross_attention:
        parts.cross_attention = CROSS_ATTENTION
        parts.pre_cross_attn_layernorm = _NORM
        parts.cross_attn_bda = get_bias_dropout_add
    return parts


def _recompute_module_of(mlp: nn.Module) -> str:
    """Return the name in --recompute-modules that recomputes the whole of `mlp`."""
    return getattr(mlp, "recompute_module", "mlp")


class TransformerLayer(MegatronModule):
    """Compute x + dropout(attention(norm(x))), then x + dropout(mlp(norm(x))); `--norm-placement` moves the norms.

    With `cross_attention` among the `submodules`, attention to another sequence is between the two. The residual stream
    keeps the dtype of x, the parts compute in that of their weights: with `--fp32-residual-connection` x is float32.

    config: a `TransformerConfig`, or our `ModelConfig`. submodules: default: our parts. layer_number: from 1; over the
    whole model if `layer_context` is given, else within the stage. hidden_dropout: default: the config's. vp_stage:
    index of the stage on this rank; default: the one that is being built. layer_context: the place in the layout;
    default: that of the process, which is asked once, here. settings: our form of `config`; default: what follows from
    it.

    forward(hidden_states [s, b, h] ([s/t, b, h] under sequence parallelism), attention_mask, context [m, b, h],
    context_mask bool [.., s or 1, m], True where masked, rotary_pos_emb [s, b or 1, 1, width]) -> (hidden states of the
    same shape, context). attention_mask: a `Mask`; a tensor is bool [b or 1, 1, s, s], True where masked. By keyword
    alone: angles [s, b or 1, width / 2], or with several ropes [ropes, s, b or 1, width / 2], which our block passes in
    the place of rotary_pos_emb; inference_context, a key/value cache.

    Every rank of tp must call. A forward costs two all-reduces of [s, b, h] over tp, three with cross-attention; under
    sequence parallelism each is an all-gather and a reduce-scatter. Raises NotImplementedError for inference_params and
    packed_seq_params, and for a cache if the attention is a script's own. Building it raises ValueError for
    cross-attention in a layer of parallel residuals.
    Megatron's file: megatron/core/transformer/transformer_layer.py.
    """

    gives_hidden_states = True  # for --inspect: the first result is [s, b, h] ([s/t, b, h])
    # Evaluation asks the last layer for these rows alone, indices in s; the forward's result is then [rows, b, h]. All rows
    # are keys and values; attention, projection and MLP are computed for the wanted ones.
    wanted_rows: Tensor | None = None

    @accepts_defaults_only("hidden_dropout", pg_collection=OWN_GROUPS, model_comm_pgs=OWN_GROUPS_BY_NAME)
    def __init__(
        self,
        config: Any,
        submodules: TransformerLayerSubmodules | None = None,
        layer_number: int = 1,
        hidden_dropout: float | None = None,
        vp_stage: int | None = None,
        *,
        layer_context: LayerContext | None = None,
        settings: ModelConfig | None = None,
    ):
        super().__init__(config)
        settings, place = of_process(config, layer_context, settings)
        parts = submodules or submodules_of(settings)
        self.submodules_config = parts
        self.vp_stage = vp_stage
        self.layer_number = layer_number if layer_context is not None else layer_number + self._get_layer_offset()
        self.hidden_dropout = settings.hidden_dropout if hidden_dropout is None else hidden_dropout
        of_layer = settings, self.layer_number, place
        of_norm = {"config": config, "hidden_size": settings.hidden_size, "eps": settings.norm_epsilon}

        def norm(spec: Any) -> nn.Module:
            return build_part(spec, *of_layer, **of_norm)

        def attention(spec: Any) -> nn.Module:
            return build_part(spec, *of_layer, config=config, layer_number=self.layer_number)

        layer = self.layer_number - 1  # from 0, which seeds the dropout masks

        # The parts. Their names are the parameters' names, and their order is that of the buffers.
        self.input_layernorm = norm(parts.input_layernorm)
        self.self_attention = attention(parts.self_attention)
        if is_custom_part(parts.self_attention):
            place.check_attends_over_whole_samples(self.self_attention, layer)
        self.self_attn_bda = build_module(parts.self_attn_bda)
        self.attention_dropout = place.hidden_dropout(self.hidden_dropout, "after attention", layer)
        self.post_self_attn_layernorm = norm(parts.post_self_attn_layernorm)
        self.pre_mlp_layernorm = norm(parts.pre_mlp_layernorm)
        self.mlp = build_part(parts.mlp, *of_layer, config=config)
        self.mlp_bda = build_module(parts.mlp_bda)
        self.post_mlp_layernorm = norm(parts.post_mlp_layernorm)
        self.mlp_dropout = place.hidden_dropout(self.hidden_dropout, "after mlp", layer)
        self.cross_attention: Any = None
        if is_custom_part(parts.cross_attention):
            if settings.norm_placement.startswith("parallel"):
                allowed = [name for name in NORM_PLACEMENTS if not name.startswith("parallel")]
                raise ValueError(
                    f"--norm-placement {settings.norm_placement} has no place for cross-attention, which reads the "
                    f"result of self-attention; set norm_placement to one of {allowed}"
                )
            self.pre_cross_attn_layernorm = norm(parts.pre_cross_attn_layernorm)
            self.cross_attention = attention(parts.cross_attention)
            self.cross_attn_bda = build_module(parts.cross_attn_bda)
            self.cross_attention_dropout = place.hidden_dropout(self.hidden_dropout, "after cross attention", layer)

        # Parts of ours take a mask, angles and a cache, Megatron's take keywords and may return (output, bias).
        self.has_our_attention = isinstance(parts.self_attention, ContextSpec)
        self.has_our_cross_attention = isinstance(parts.cross_attention, ContextSpec)
        self.norm_placement = settings.norm_placement
        self.residual_multiplier = settings.residual_multiplier
        self.apply_residual_connection_post_layernorm = settings.apply_residual_connection_post_layernorm
        self.recomputes_mlp = settings.recomputes(_recompute_module_of(self.mlp))
        self.recomputes_norms = settings.recomputes("layernorm")
        self.keys = place.keys
        self.compiled = compiles(settings, place.tp.device)
        self.compiled_layer = None
        if self.compiled and settings.compile == "layers":
            self.compiled_layer = WholeLayerPrograms(self, settings, place.tp)

    @property
    def attentions_without_cache(self) -> list[nn.Module]:
        """The attentions with Megatron's arguments, which are given no cache."""
        attentions = []
        if not self.has_our_attention:
            attentions.append(self.self_attention)
        if self.cross_attention is not None and not self.has_our_cross_attention:
            attentions.append(self.cross_attention)
        return attentions

    def _get_layer_offset(self) -> int:
        """Return the number of layers in earlier stages."""
        return layers_of_stage(self.config, vp_stage=self.vp_stage).start

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Any = None,
        context: Tensor | None = None,
        context_mask: Tensor | None = None,
        rotary_pos_emb: Tensor | None = None,
        inference_params: None = None,
        packed_seq_params: None = None,
        *,
        angles: Tensor | None = None,
        inference_context: AttentionCache | None = None,
    ) -> tuple[Tensor, Any]:
        if inference_params is not None or packed_seq_params is not None:
            raise NotImplementedError("inference_params and packed_seq_params are not built yet; leave them out")
        x = hidden_states
        if angles is None and rotary_pos_emb is not None and self.has_our_attention:
            angles = rotary_pos_emb[:, :, 0, : rotary_pos_emb.shape[-1] // 2]  # [s, b or 1, width / 2]
        if rotary_pos_emb is None and angles is not None and not self.has_our_attention:
            rotary_pos_emb = to_rotary_pos_emb(angles)  # [s, b or 1, 1, width]

        # --compile layers: two compiled programs, and between them the attention kernel
        if self.compiled_layer is not None and self.compiled_layer.can_run(inference_context):
            x, mixed_qkv = self.compiled_layer.before_attention(x)  # [s, b, h], [s, b, (n + 2 groups) d]
            heads = self.self_attention.get_query_key_value_tensors(mixed_qkv, None, angles)
            core_attn_out = self.self_attention.attend(heads, attention_mask)  # [s, b, n d]
            return self.compiled_layer.after_attention(x, core_attn_out), context

        def attention(normed: Tensor) -> Any:
            if self.has_our_attention:
                return self.self_attention(normed, attention_mask, angles, inference_context)
            if inference_context is not None:
                raise no_cache_in_custom_layer(self.self_attention)
            if isinstance(attention_mask, MaskWithBias) and not isinstance(self.self_attention, ParallelAttention):
                raise NotImplementedError(
                    f"{type(self.self_attention).__name__}: relative positions are not supported for an attention of a "
                    "script's own; subclass SelfAttention, or set --position-embedding-type learned_absolute"
                )
            mask = attention_mask.mask if isinstance(attention_mask, Documents) else attention_mask  # [b, 1, s, s]
            # an attention without rotary positions need not take the argument
            rotary = {} if rotary_pos_emb is None else {"rotary_pos_emb": rotary_pos_emb}
            return self.self_attention(normed, attention_mask=mask, **rotary)

        def cross_attention(normed: Tensor) -> Any:
            if not self.has_our_cross_attention:
                return self.cross_attention(normed, attention_mask=context_mask, key_value_states=context)
            memory = None if context is None else context.to(normed.dtype)  # [m, b, h]
            kv_cache = inference_context.memory if isinstance(inference_context, DecoderCache) else None
            return self.cross_attention(normed, memory, context_mask, kv_cache)

        # parallel residual (GPT-J, GPT-NeoX): both blocks read x, and both results are added to it
        if self.norm_placement in ("parallel", "parallel-one-norm"):
            if self.norm_placement == "parallel-one-norm" and _is_absent(self.pre_mlp_layernorm):
                x, normed = _residual_and_norm(self.input_layernorm, x)
                attention_out = attention(normed)
                mlp_out = self._run_mlp(normed)
            else:
                x, attention_out = self._norm_then(self.input_layernorm, x, attention)
                x, mlp_out = self._norm_then(self.pre_mlp_layernorm, x, self._run_mlp)
            x = self._add_residual(x, attention_out, self.self_attn_bda, self.attention_dropout)
            return self._add_residual(x, mlp_out, self.mlp_bda, self.mlp_dropout), context

        # x + dropout(attention(norm(x)))
        x, out = self._norm_then(self.input_layernorm, x, attention)
        if self.wanted_rows is not None:
            x = x[self.wanted_rows]
        x = self._add_residual(x, out, self.self_attn_bda, self.attention_dropout, self.post_self_attn_layernorm)

        # x + dropout(cross attention(norm(x)))
        if self.cross_attention is not None:
            x, out = self._norm_then(self.pre_cross_attn_layernorm, x, cross_attention)
            x = self._add_residual(x, out, self.cross_attn_bda, self.cross_attention_dropout)

        # x + dropout(mlp(norm(x)))
        x, out = self._norm_then(self.pre_mlp_layernorm, x, self._run_mlp)
        x = self._add_residual(x, out, self.mlp_bda, self.mlp_dropout, self.post_mlp_layernorm)
        return x, context

    @contextlib.contextmanager
    def wanting(self, rows: Tensor) -> Iterator[None]:
        """Inside the block the forward returns these rows alone. Only for layers whose `can_want_rows` is True."""
        self.wanted_rows = self.self_attention.wanted_rows = rows
        try:
            yield
        finally:
            self.wanted_rows = self.self_attention.wanted_rows = None

    @property
    def can_want_rows(self) -> bool:
        """Whether `wanting` works: attention, then a dense MLP, both ours and on all tokens."""
        is_ours = type(self).forward in (TransformerLayer.forward, ParallelTransformerLayer.forward)
        has_our_parts = type(self.self_attention) is ParallelAttention and type(self.mlp) is ParallelMLP
        is_serial = not self.norm_placement.startswith("parallel") and self.cross_attention is None
        return is_ours and has_our_parts and is_serial and self.compiled_layer is None

    @property
    def norms_its_input(self) -> bool:
        """Whether linear layers read results of norms of ours alone, never the layer's input itself."""
        is_ours = type(self).forward in (TransformerLayer.forward, ParallelTransformerLayer.forward)
        first_norms = [self.input_layernorm]
        if self.norm_placement == "parallel":
            first_norms.append(self.pre_mlp_layernorm)
        return is_ours and all(isinstance(norm, Norm) for norm in first_norms)

    def count_flops(self, x: LayerInput) -> Flops:
        memory = x.memory
        x = replace(x, memory=None)
        flops = flops_of(self.self_attention, x.after(self.input_layernorm))

        # the blocks that follow read a sum with the result of attention, unless all blocks read x
        reads = x
        if not self.norm_placement.startswith("parallel"):
            reads = x.after(self.input_layernorm, self.self_attention, self.post_self_attn_layernorm)
        elif _is_absent(self.pre_mlp_layernorm):
            reads = x.after(self.input_layernorm)
        if self.cross_attention is not None:
            reads = reads.after(self.pre_cross_attn_layernorm)
            flops += flops_of(self.cross_attention, replace(reads, memory=memory))
            reads = reads.after(self.cross_attention)
            if memory is not None and memory.requires_grad:
                reads = replace(reads, requires_grad=True)
        flops += flops_of(self.mlp, reads.after(self.pre_mlp_layernorm), recompute=self.recomputes_mlp)
        return flops + further_flops(self, x, (self.self_attention, self.cross_attention, self.mlp))

    def _run_mlp(self, normed: Tensor) -> Any:
        """Run the MLP on [s, b, h] ([s/t, b, h] under sequence parallelism), to the same shape, or (output, bias [h]).

        With `--recompute-modules mlp` the backward computes its activations again.
        """
        if self.recomputes_mlp:
            return recompute_in_backward(self.mlp, self.keys, normed, modules=[self.mlp])
        return self.mlp(normed)

    def _norm_then(self, norm: nn.Module, x: Tensor, block: Callable[[Tensor], Any]) -> tuple[Tensor, Any]:
        """Return (residual, block(norm(x))), the residual in the shape of x.

        The residual is x, or norm(x) where the config adds to the norm's output.
        """
        if _is_absent(norm):
            return x, block(x)
        x, normed = _residual_and_norm(norm, x)
        out = block(normed)
        if self.apply_residual_connection_post_layernorm:
            return normed, out
        if self.recomputes_norms and isinstance(norm, Norm):
            output = out[0] if isinstance(out, tuple) else out
            if output.requires_grad:
                discard_and_recompute(normed, partial(norm, x), until=output)
        return x, out

    def _add_residual(
        self, residual: Tensor, out_with_bias: Any, bda: Any, dropout: nn.Module, norm: nn.Module | None = None
    ) -> Tensor:
        """Return residual + dropout(out + bias), all of one shape, or the result of a script's own `bda`.

        out_with_bias: the output, or (output, bias [h] or None). norm: of the sum with `--norm-placement post`, else of
        the output before the sum. Our `dropout` replaces that of `get_bias_dropout_add`: its masks are the same in
        every layout.
        """
        has_norm = not _is_absent(norm)
        normalizes_sum = has_norm and self.norm_placement == "post"
        normalizes_output = has_norm and not normalizes_sum
        is_ours = bda is get_bias_dropout_add
        out = out_with_bias
        if isinstance(out, tuple) and (is_ours or normalizes_output or self.residual_multiplier != 1):
            out, bias = out_with_bias
            if bias is not None:
                out = out + bias
        if normalizes_output:
            out = norm(out)
        if self.residual_multiplier != 1:
            out = out * self.residual_multiplier

        if not is_ours:
            fused = self.compiled if isinstance(self.config, ModelConfig) else self.config.bias_dropout_fusion
            x = bda(self.training, fused)(out, residual, self.hidden_dropout)
        elif self.compiled and isinstance(dropout, HiddenDropout) and dropout.is_active:
            words = dropout.words_for(out)
            x = REGIONS["residual"].compiled(residual, out, *words, dropout.probability, out.dtype)
        else:
            x = residual + dropout(out)
        return norm(x) if normalizes_sum else x


class ParallelTransformerLayer(TransformerLayer):
    """The `TransformerLayer` by its classic name, which is built from (config, layer, context) and returns a tensor.

    layer: counts from 0 over the whole model. `make_attention` and `make_mlp` build the two blocks; a model passes its
    own: `make_layer=partial(ParallelTransformerLayer, make_mlp=OwnMLP)`.

    forward(x [s, b, h] ([s/t, b, h] under sequence parallelism), mask, angles, cache) -> the shape of x. mask, angles,
    cache: see `ParallelAttention`. Every rank of tp must call.
    """

    def __init__(
        self,
        config: ModelConfig,
        layer: int,
        context: LayerContext,
        *,
        make_attention: MakePart = ParallelAttention,
        make_mlp: MakePart = ParallelMLP,
    ):
        parts = replace(submodules_of(config), self_attention=ContextSpec(make_attention), mlp=ContextSpec(make_mlp))
        super().__init__(config, parts, layer + 1, layer_context=context)

    def forward(  # type: ignore[override]
        self, x: Tensor, mask: Tensor | None = None, angles: Tensor | None = None, cache: AttentionCache | None = None
    ) -> Tensor:
        hidden_states, _ = super().forward(x, mask, angles=angles, inference_context=cache)
        return hidden_states


def _is_absent(norm: nn.Module | None) -> bool:
    """Return whether a layer lacks this norm. A script may set one to None."""
    return norm is None or isinstance(norm, IdentityOp)


def _residual_and_norm(norm: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return (x, norm(x)), both in the shape of x.

    A compiled norm returns x as well: its backward adds the gradients of both in one pass.
    """
    if isinstance(norm, Norm) and norm.returns_residual:
        return norm(x, with_input=True)
    return x, norm(x)


def no_cache_in_custom_layer(part: nn.Module) -> NotImplementedError:
    """Return the error of a layer, or of an attention, of a script's own that is given a key/value cache."""
    return NotImplementedError(f"{type(part).__name__} {TAKES_NO_CACHE}")


TAKES_NO_CACHE = (
    "takes no key/value cache, so it cannot generate text; a layer or an attention that a script builds from (config, layer, "
    "context) can: its forward takes the cache as the fourth argument, after x, mask and angles"
)


def to_rotary_pos_emb(angles: Tensor) -> Tensor:
    """Return angles [s, b or 1, width / 2] as Megatron has them, repeated for both halves of a head.

    The result is [s, b or 1, 1, width]. Raises NotImplementedError for the angles of several ropes, of 4 dimensions.
    """
    if angles.dim() == 4:
        raise NotImplementedError(
            "rotary angles that differ between layers are not supported for custom layers; give all layers one rotary "
            "base, or use the layers of our own spec"
        )
    return torch.cat((angles, angles), -1).unsqueeze(2)


def layers_of_stage(config: Any, num_layers: int | None = None, vp_stage: int | None = None) -> range:
    """Return the layers of the pipeline stage that is being built, numbered from 0 over the whole model.

    num_layers: of the whole model; default: the config's. vp_stage: index of the stage on this rank; default: the one
    that is being built.
    """
    state = get_global_state()
    stages = state.mesh.stages
    layout = getattr(config, "pipeline_model_parallel_layout", None)
    if layout is not None:
        layers = split_by_layout(layout, num_layers or config.num_layers, len(stages.ranks))
    else:
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
    position = (state.virtual_rank or 0) if vp_stage is None else vp_stage
    return layers[stages_of_rank[position]]


# Megatron's names.
__getattr__, __dir__ = lazy_names(__name__, {})
