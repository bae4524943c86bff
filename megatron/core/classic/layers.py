"""Layers of Megatron core, built from a spec: each part ours or the user's own.

    spec = get_gpt_layer_local_spec()
    spec.submodules.mlp = ModuleSpec(MyMLP, submodules=...)
    GPTModel(config, spec, vocab_size=..., max_sequence_length=...)

A part of the user's is built and called as Megatron does: a layer from (config, submodules, layer_number), attention likewise,
an MLP from (config, submodules), a norm from (config, hidden_size, eps).
"""

from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from megatron.core.base.signatures import takes
from megatron.core.classic.modules import (
    AttnMaskType,
    FusedLayerNorm,
    IdentityFuncOp,
    IdentityOp,
    MegatronModule,
    context_of,
    get_bias_dropout_add,
    settings_of,
)
from megatron.core.classic.specs import ModuleSpec, build_module, get_module
from megatron.core.classic.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.ops.attention.masks import Documents
from megatron.core.parallel.global_state import current
from megatron.core.pipeline_parallel.layer_split import split_layers
from megatron.core.transformer.attention import CoreAttention, ParallelAttention
from megatron.core.transformer.layer_context import LayerContext, MakePart
from megatron.core.transformer.mlp import ParallelMLP
from megatron.core.transformer.model_config import ModelConfig
from megatron.core.transformer.parallel_transformer import ParallelTransformer
from megatron.core.transformer.transformer_layer import ParallelTransformerLayer


def layers_of_stage(config: Any, num_layers: int | None = None) -> range:
    """The layers, from 0 over the whole model, of the stage that is being built. num_layers: of the model, else the config's."""
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
class SelfAttentionSubmodules:
    linear_qkv: Any = None
    core_attention: Any = None
    linear_proj: Any = None
    q_layernorm: Any = None
    k_layernorm: Any = None


@takes(activation_func=None)
@dataclass
class MLPSubmodules:
    linear_fc1: Any = None
    linear_fc2: Any = None


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


@takes(layer_norm=None)
@dataclass
class TransformerBlockSubmodules:
    layer_specs: list[ModuleSpec] | None = None


def _is_own(spec: Any, *ours: type) -> bool:
    """Whether a part of a spec is the user's."""
    return spec is not None and get_module(spec) not in (IdentityOp, *ours)


class DotProductAttention(CoreAttention):
    """forward(query [s, b, n, d], key, value, attention_mask) -> [s, b, n d]"""

    def __init__(
        self,
        config: Any,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        **options: Any,
    ):
        del attn_mask_type, attention_type
        options |= {"attention_dropout": attention_dropout, "softmax_scale": softmax_scale}
        if getattr(config, "window_size", None) is not None:
            raise ValueError("DotProductAttention has no window; build SelfAttention, which has config.window_size")
        ours = settings_of(config, **{name: value for name, value in options.items() if value is not None})
        super().__init__(ours, layer_number - 1, context_of(ours, config))

    def forward(self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **_: Any) -> Tensor:
        return super().forward(query, key, value, attention_mask)


class SelfAttention(ParallelAttention):
    """forward(hidden_states [s, b, h], attention_mask, rotary_pos_emb=[s, 1, 1, d]) -> (output [s, b, h], bias or None)"""

    @takes(cp_comm_type=None, pg_collection=None)
    def __init__(
        self,
        config: Any,
        submodules: SelfAttentionSubmodules,
        layer_number: int,
        attn_mask_type: Any = AttnMaskType.padding,
    ):
        norms = {"qk_layernorm": True} if FusedLayerNorm in (submodules.q_layernorm, submodules.k_layernorm) else {}
        ours, made = settings_of(config, **norms), submodules.core_attention
        of_core = {"layer_number": layer_number, "attn_mask_type": attn_mask_type, "attention_type": "self"}
        own_core = lambda *_: build_module(made, config=config, **of_core)  # noqa: E731
        core = {"make_core": own_core} if _is_own(made, DotProductAttention) else {}
        super().__init__(ours, layer_number - 1, context_of(ours, config), **core)
        self.config = config
        self.layer_number, self.attn_mask_type = layer_number, attn_mask_type
        h, d = ours.hidden_size, ours.head_width
        queries = ours.num_attention_heads * d
        options = {"config": config, "is_expert": False}
        if _is_own(submodules.linear_qkv, ColumnParallelLinear):
            of_qkv = {"gather_output": False, "skip_bias_add": False, "tp_comm_buffer_name": "qkv"}
            of_qkv |= {"init_method": config.init_method, "bias": config.add_bias_linear or config.add_qkv_bias}
            width = queries + 2 * ours.query_groups * d
            self.linear_qkv = build_module(submodules.linear_qkv, h, width, **options, **of_qkv)
        self.linear_proj.skip_bias_add = True
        if _is_own(submodules.linear_proj, RowParallelLinear):
            of_proj = {"input_is_parallel": True, "skip_bias_add": True, "tp_comm_buffer_name": "proj"}
            of_proj |= {"init_method": config.output_layer_init_method, "bias": config.add_bias_linear}
            self.linear_proj = build_module(submodules.linear_proj, queries, h, **options, **of_proj)
        of_norm = {"config": config, "hidden_size": d, "eps": ours.norm_epsilon}
        if _is_own(submodules.q_layernorm, FusedLayerNorm):
            self.q_layernorm = build_module(submodules.q_layernorm, **of_norm)
        if _is_own(submodules.k_layernorm, FusedLayerNorm):
            self.k_layernorm = build_module(submodules.k_layernorm, **of_norm)

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Any = None,
        rotary_pos_emb: Tensor | None = None,
        inference_params: None = None,
        packed_seq_params: None = None,
    ) -> tuple[Tensor, Tensor | None]:
        if inference_params is not None or packed_seq_params is not None:
            raise NotImplementedError("inference_params and packed_seq_params are not built yet; leave them out")
        angles = None
        if rotary_pos_emb is not None:
            angles = rotary_pos_emb[:, :, 0, : rotary_pos_emb.shape[-1] // 2]
        return self.linear_proj(self.attended(hidden_states, attention_mask, angles))


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


# ---------------------------------------------------------------- specs


def _layer_spec(mask: Any, head_norm: Any = None) -> ModuleSpec:
    parts = SelfAttentionSubmodules(
        ColumnParallelLinear, DotProductAttention, RowParallelLinear, q_layernorm=head_norm, k_layernorm=head_norm
    )
    return ModuleSpec(
        TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=FusedLayerNorm,
            self_attention=ModuleSpec(SelfAttention, {"attn_mask_type": mask}, parts),
            self_attn_bda=get_bias_dropout_add,
            pre_mlp_layernorm=FusedLayerNorm,
            mlp=ModuleSpec(MLP, submodules=MLPSubmodules(ColumnParallelLinear, RowParallelLinear)),
            mlp_bda=get_bias_dropout_add,
        ),
    )


@takes(use_kitchen=False, use_kitchen_attention=False, kitchen_attention_backend="sdpa")
def get_gpt_layer_local_spec(
    num_experts: int | None = None,
    moe_grouped_gemm: bool = False,
    qk_layernorm: bool = False,
    multi_latent_attention: bool = False,
    fp8: str | None = None,
    moe_use_legacy_grouped_gemm: bool = False,
    normalization: str | None = None,
    qk_l2_norm: bool = False,
) -> ModuleSpec:
    """A GPT layer of ours. qk_layernorm: normalizes heads, as the config's field does. The kind of norm is the config's."""
    del moe_grouped_gemm, moe_use_legacy_grouped_gemm, normalization
    refused = {"num_experts": num_experts, "multi_latent_attention": multi_latent_attention, "fp8": fp8}
    if given := [name for name, value in {**refused, "qk_l2_norm": qk_l2_norm}.items() if value]:
        raise ValueError(f"get_gpt_layer_local_spec: {', '.join(given)} is not built yet; leave it out")
    return _layer_spec(AttnMaskType.causal, FusedLayerNorm if qk_layernorm else None)


@takes(
    use_te_op_fuser=False,
    use_kitchen=False,
    use_te_activation_func=False,
    use_kitchen_attention=False,
    kitchen_attention_backend="sdpa",
)
def get_gpt_layer_with_transformer_engine_spec(
    num_experts: int | None = None,
    moe_grouped_gemm: bool = False,
    qk_layernorm: bool = False,
    multi_latent_attention: bool = False,
    fp8: str | None = None,
    moe_use_legacy_grouped_gemm: bool = False,
    qk_l2_norm: bool = False,
) -> ModuleSpec:
    """The same: layers of ours."""
    given = (num_experts, moe_grouped_gemm, qk_layernorm, multi_latent_attention, fp8, moe_use_legacy_grouped_gemm)
    return get_gpt_layer_local_spec(*given, qk_l2_norm=qk_l2_norm)


bert_layer_local_spec = _layer_spec(AttnMaskType.padding)
bert_layer_with_transformer_engine_spec = _layer_spec(AttnMaskType.padding)


class OfTwoSequences(NamedTuple):
    """In place of a mask: the layers' own, and the other sequence that they attend to, with its mask."""

    own: Any
    context: Tensor
    context_mask: Tensor | None


class SpecLayer(nn.Module):
    """A user's layer in a stage of ours. forward(x [s, b, h], mask, angles) -> the shape of x"""

    gives_hidden_states = True

    def __init__(self, spec: Any, config: Any, layer_number: int):
        super().__init__()
        self.layer = build_module(spec, config=config, layer_number=layer_number)

    def forward(self, x: Tensor, mask: Any = None, angles: Tensor | None = None, cache: Any = None) -> Tensor:
        if cache is not None:
            raise NotImplementedError("generation with the layers of a script is not built yet; leave out the cache")
        rotary = {} if angles is None else {"rotary_pos_emb": torch.cat((angles, angles), -1).unsqueeze(2)}
        if isinstance(mask, OfTwoSequences):
            rotary |= {"context": mask.context, "context_mask": mask.context_mask}
            mask = mask.own
        out = self.layer(x, mask.mask if isinstance(mask, Documents) else mask, **rotary)
        return out[0] if isinstance(out, tuple) else out


def make_layer_of(spec: Any, config: Any) -> MakePart:
    """What builds the layers of a spec: of ours, if the spec is as this file made it."""
    spec = spec.submodules if isinstance(getattr(spec, "submodules", None), TransformerBlockSubmodules) else spec
    first = layers_of_stage(config).start

    def make(ours: ModelConfig, layer: int, context: LayerContext) -> nn.Module:
        one = spec.layer_specs[layer - first] if isinstance(spec, TransformerBlockSubmodules) else spec
        normed = one == get_gpt_layer_local_spec(qk_layernorm=True)
        if not normed and one not in (get_gpt_layer_local_spec(), bert_layer_local_spec):
            return SpecLayer(one, config, layer - first + 1)
        made = ParallelTransformerLayer(replace(ours, qk_layernorm=True) if normed else ours, layer, context)
        made.layer_number = layer + 1
        return made

    return make


class TransformerBlock(ParallelTransformer):
    """The layers of a stage. forward(hidden_states [s, b, h], attention_mask) -> the same shape"""

    @takes(pg_collection=None, vp_stage=None)
    def __init__(
        self, config: Any, spec: Any, post_layer_norm: bool = True, pre_process: bool = True, post_process: bool = True
    ):
        ours, make = settings_of(config), make_layer_of(spec, config)
        has_norm = post_layer_norm and post_process
        super().__init__(
            ours, layers_of_stage(config), context_of(ours, config), post_process=has_norm, make_layer=make
        )
        self.config = config
        self.pre_process, self.post_process = pre_process, post_process
        self.input_tensor: Tensor | None = None
        self.num_layers_per_pipeline_rank = len(self.layers)
        self.checkpoint_core_attention = config.recompute_granularity == "selective"

    def _get_layer(self, layer_number: int) -> nn.Module:
        return list(self.layers.values())[layer_number]

    def set_input_tensor(self, input_tensor: Tensor) -> None:
        self.input_tensor = input_tensor

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Any = None,
        context: Tensor | None = None,
        context_mask: Tensor | None = None,
        **others: Any,
    ) -> Tensor:
        if given := [name for name, value in others.items() if value is not None]:
            raise NotImplementedError(f"TransformerBlock: {', '.join(given)} is not built yet; leave it out")
        x = hidden_states if self.pre_process else self.input_tensor
        seen = attention_mask if context is None else OfTwoSequences(attention_mask, context, context_mask)
        return super().forward(x, seen)
