"""List the supported families of models by the model_type of their config.json.

To add one: write a `Family` in a file of its own, and a line here; a fork adds its line before it calls `pretrain`. A
model that several families can describe is written as the first of them.
"""

from megatron.convert.families import bert, gpt2_neox_phi_starcoder2, llama_like, mixtral_qwen_moe_olmoe_gpt_oss, t5
from megatron.convert.families.hf_family_fields_and_param_mappings import Family
from megatron.core.base.registry_with_checked_entries import Registry

FAMILIES = Registry(
    "FAMILIES",
    Family,
    {
        "gpt2": gpt2_neox_phi_starcoder2.GPT2,
        "llama": llama_like.LLAMA,
        "mistral": llama_like.MISTRAL,
        "qwen2": llama_like.QWEN2,
        "qwen3": llama_like.QWEN3,
        "gemma": llama_like.GEMMA,
        "gemma2": llama_like.GEMMA2,
        "gemma3_text": llama_like.GEMMA3,
        "gpt_neox": gpt2_neox_phi_starcoder2.GPT_NEOX,
        "phi": gpt2_neox_phi_starcoder2.PHI,
        "phi3": llama_like.PHI3,
        "olmo2": llama_like.OLMO2,
        "olmo3": llama_like.OLMO3,
        "smollm3": llama_like.SMOLLM3,
        "starcoder2": gpt2_neox_phi_starcoder2.STARCODER2,
        "granite": llama_like.GRANITE,
        "cohere": llama_like.COHERE,
        "cohere2": llama_like.COHERE2,
        "mixtral": mixtral_qwen_moe_olmoe_gpt_oss.MIXTRAL,
        "qwen2_moe": mixtral_qwen_moe_olmoe_gpt_oss.QWEN2_MOE,
        "qwen3_moe": mixtral_qwen_moe_olmoe_gpt_oss.QWEN3_MOE,
        "olmoe": mixtral_qwen_moe_olmoe_gpt_oss.OLMOE,
        "flex_olmo": mixtral_qwen_moe_olmoe_gpt_oss.FLEX_OLMO,
        "granitemoe": mixtral_qwen_moe_olmoe_gpt_oss.GRANITE_MOE,
        "granitemoeshared": mixtral_qwen_moe_olmoe_gpt_oss.GRANITE_MOE_SHARED,
        "gpt_oss": mixtral_qwen_moe_olmoe_gpt_oss.GPT_OSS,
        "t5": t5.T5,
        "bert": bert.BERT,
    },
)
