"""Megatron's layer specs of a GPT."""

from megatron.core.base.lazy_imports import names_of_megatron
from megatron.core.base.unsupported_arguments import accepts_defaults_only
from megatron.core.transformer.local_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.spec_utils import ModuleSpec


@accepts_defaults_only(
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


__getattr__ = names_of_megatron(__name__)
