"""Megatron's local layer specs of GPT and BERT, whose layers are all our own."""

from typing import Any

from megatron.core.base.unsupported_arguments import accepts_defaults_only
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.bias_dropout_add import get_bias_dropout_add
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import FusedLayerNorm
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules


def _layer_spec(mask_type: Any, qk_norm: Any = None) -> ModuleSpec:
    attention_parts = SelfAttentionSubmodules(
        linear_qkv=ColumnParallelLinear,
        core_attention=DotProductAttention,
        linear_proj=RowParallelLinear,
        q_layernorm=qk_norm,
        k_layernorm=qk_norm,
    )
    return ModuleSpec(
        TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=FusedLayerNorm,
            self_attention=ModuleSpec(SelfAttention, {"attn_mask_type": mask_type}, attention_parts),
            self_attn_bda=get_bias_dropout_add,
            pre_mlp_layernorm=FusedLayerNorm,
            mlp=ModuleSpec(MLP, submodules=MLPSubmodules(ColumnParallelLinear, RowParallelLinear)),
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

    The config says which norm it is, and which layers have experts (num_moe_experts, moe_layer_freq). Raises ValueError
    for what is not built.
    """
    del num_experts, moe_grouped_gemm, moe_use_legacy_grouped_gemm, normalization  # in Megatron's signature
    not_built = {"multi_latent_attention": multi_latent_attention, "fp8": fp8, "qk_l2_norm": qk_l2_norm}
    requested = [name for name, value in not_built.items() if value]
    if requested:
        raise ValueError(f"get_gpt_layer_local_spec: {', '.join(requested)} is not built yet; leave it out")
    return _layer_spec(AttnMaskType.causal, FusedLayerNorm if qk_layernorm else None)


bert_layer_local_spec = _layer_spec(AttnMaskType.padding)
