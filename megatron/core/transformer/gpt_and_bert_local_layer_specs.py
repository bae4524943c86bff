"""Megatron's local layer specs of GPT and BERT, whose layers are all our own."""

from typing import Any

from torch import nn

from megatron.core.base.unsupported_arguments import accepts_defaults_only
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.bias_dropout_add import get_bias_dropout_add
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.layer_parallel_context import LayerContext
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.model_config import ModelConfig
from megatron.core.transformer.moe.moe_layer import mlp_of_layer
from megatron.core.transformer.spec_utils import ContextSpec, ModuleSpec
from megatron.core.transformer.torch_norm import FusedLayerNorm
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules


def _experts_of_layer(config: ModelConfig, layer: int, context: LayerContext) -> nn.Module:
    """Return the MLP of a layer whose spec has experts: dense where moe_layer_freq of the config says so."""
    if not config.has_experts:
        raise ValueError(
            "the spec of a layer was made with num_experts, and the config's num_moe_experts is None; set it, or leave "
            "num_experts out"
        )
    return mlp_of_layer(config, layer, context)


def _layer_spec(mask_type: Any, qk_norm: Any = None, *, has_experts: bool = False) -> ModuleSpec:
    attention_parts = SelfAttentionSubmodules(
        linear_qkv=ColumnParallelLinear,
        core_attention=DotProductAttention,
        linear_proj=RowParallelLinear,
        q_layernorm=qk_norm,
        k_layernorm=qk_norm,
    )
    dense = ModuleSpec(MLP, submodules=MLPSubmodules(ColumnParallelLinear, RowParallelLinear))
    return ModuleSpec(
        TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=FusedLayerNorm,
            self_attention=ModuleSpec(SelfAttention, {"attn_mask_type": mask_type}, attention_parts),
            self_attn_bda=get_bias_dropout_add,
            pre_mlp_layernorm=FusedLayerNorm,
            mlp=ContextSpec(_experts_of_layer) if has_experts else dense,
            mlp_bda=get_bias_dropout_add,
        ),
    )


@accepts_defaults_only(use_kitchen=False, use_kitchen_attention=False, kitchen_attention_backend="sdpa")
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
    """Return the spec of our GPT layer. qk_layernorm: normalize query and key heads, as the config's field.

    num_experts: None: a dense MLP; else experts, as many and in the layers that the config says (num_moe_experts,
    moe_layer_freq). The config also says which norm it is. Raises ValueError for what is not built.
    """
    del moe_grouped_gemm, moe_use_legacy_grouped_gemm, normalization  # in Megatron's signature
    not_built = {"multi_latent_attention": multi_latent_attention, "fp8": fp8, "qk_l2_norm": qk_l2_norm}
    requested = [name for name, value in not_built.items() if value]
    if requested:
        raise ValueError(f"get_gpt_layer_local_spec: {', '.join(requested)} is not built yet; leave it out")
    qk_norm = FusedLayerNorm if qk_layernorm else None
    return _layer_spec(AttnMaskType.causal, qk_norm, has_experts=num_experts is not None)


bert_layer_local_spec = _layer_spec(AttnMaskType.padding)
