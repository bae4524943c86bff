"""Megatron's layer specs of a GPT."""

from typing import Any

from megatron.core.base.lazy_imports import names_of_megatron
from megatron.core.base.unsupported_arguments import accepts_defaults_only
from megatron.core.transformer.gpt_and_bert_local_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_layer import layers_of_stage


@accepts_defaults_only(
    use_te_op_fuser=False,
    use_kitchen=False,
    use_te_activation_func=False,
    use_kitchen_attention=False,
    kitchen_attention_backend="sdpa",
    mla_down_proj_fusion=False,
    use_grouped_gemm_for_dense_mlp=False,
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
    """Return the local spec: our own layers, which do not use Transformer Engine."""
    return get_gpt_layer_local_spec(
        num_experts=num_experts,
        moe_grouped_gemm=moe_grouped_gemm,
        qk_layernorm=qk_layernorm,
        multi_latent_attention=multi_latent_attention,
        fp8=fp8,
        moe_use_legacy_grouped_gemm=moe_use_legacy_grouped_gemm,
        qk_l2_norm=qk_l2_norm,
    )


@accepts_defaults_only(pp_rank=None)
def get_gpt_decoder_layer_specs(
    config: Any,
    use_transformer_engine: bool,
    normalization: str | None = None,
    qk_l2_norm: bool = False,
    vp_stage: int | None = None,
) -> list[ModuleSpec]:
    """Return the spec of each layer of the whole model: our own layers, whatever `use_transformer_engine` says.

    config: a `TransformerConfig`. Raises ValueError for layers that are not built.
    """
    del use_transformer_engine, vp_stage
    spec = get_gpt_layer_local_spec(
        num_experts=config.num_moe_experts,
        moe_grouped_gemm=config.moe_grouped_gemm,
        qk_layernorm=config.qk_layernorm,
        multi_latent_attention=config.multi_latent_attention,
        normalization=normalization,
        qk_l2_norm=qk_l2_norm,
    )
    return [spec] * config.num_layers


def get_gpt_decoder_block_spec(
    config: Any,
    use_transformer_engine: bool,
    normalization: str | None = None,
    qk_l2_norm: bool = False,
    vp_stage: int | None = None,
    pp_rank: int | None = None,
) -> TransformerBlockSubmodules:
    """Return the specs of the layers of this process's stage, or of its chunk `vp_stage`; see the function above."""
    specs = get_gpt_decoder_layer_specs(config, use_transformer_engine, normalization, qk_l2_norm, vp_stage, pp_rank)
    return TransformerBlockSubmodules([specs[i] for i in layers_of_stage(config, vp_stage=vp_stage)])


__getattr__ = names_of_megatron(__name__)
