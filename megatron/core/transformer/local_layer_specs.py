"""The specs of a layer of a GPT and of a BERT that is all our own: what Megatron calls its local implementation."""

from typing import Any

from megatron.core.base.unsupported_arguments import takes
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.bias_dropout_add import get_bias_dropout_add
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import FusedLayerNorm
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules


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


bert_layer_local_spec = _layer_spec(AttnMaskType.padding)
