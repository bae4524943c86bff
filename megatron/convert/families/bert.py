"""Table of BERT as published: norms after the blocks and after the embedding.

It has heads for masked tokens and for sentence order.
"""

from megatron.convert.families.config_fields import count, dropout_rate, fixed, fixed_not_written, ignored_keys, number
from megatron.convert.families.hf_family_fields_and_param_mappings import (
    LANGUAGE_MODEL,
    LAYER,
    NO_LM_HEAD,
    NOT_ENCODER_DECODER,
    OUTPUT_LAYER,
    UNUSED_KEYS,
    WORD_EMBEDDINGS,
    Family,
    Head,
    ParamMapping,
    activation,
    weight_and_bias,
)

_EMBEDDINGS = "bert.embeddings."
_LM_HEAD = "cls.predictions."
_HF_LAYER = "bert.encoder.layer.{i}."

BERT = Family(
    "BertForPreTraining",
    {"normalization": "LayerNorm", "position_embedding_type": "learned_absolute", "norm_placement": "post"},
    (
        count("hidden_size", "hidden_size", 768),
        count("num_hidden_layers", "num_layers", 12),
        count("num_attention_heads", "num_attention_heads", 12),
        count("intermediate_size", "ffn_hidden_size", 3072, value_from="ffn_size"),
        count("max_position_embeddings", "max_position_embeddings", 512),
        number("layer_norm_eps", "norm_epsilon", 1e-12),
        activation("hidden_act", "gelu", gated=False),
        dropout_rate("hidden_dropout_prob", "hidden_dropout", 0.1),
        dropout_rate("attention_probs_dropout_prob", "attention_dropout", 0.1),
        fixed("type_vocab_size", 2),
        fixed("tie_word_embeddings", True),
        fixed_not_written("position_embedding_type", "absolute"),
        *NOT_ENCODER_DECODER,
        fixed_not_written("directionality", "bidi"),
        ignored_keys("pooler_fc_size", "pooler_num_attention_heads", "pooler_num_fc_layers"),
        ignored_keys("pooler_size_per_head", "pooler_type"),
        UNUSED_KEYS,
    ),
    (
        ParamMapping(WORD_EMBEDDINGS, "copy", (f"{_EMBEDDINGS}word_embeddings.weight",)),
        ParamMapping(
            f"{LANGUAGE_MODEL}embedding.position_embeddings.weight",
            "copy",
            (f"{_EMBEDDINGS}position_embeddings.weight",),
        ),
        ParamMapping(
            f"{LANGUAGE_MODEL}embedding.tokentype_embeddings.weight",
            "copy",
            (f"{_EMBEDDINGS}token_type_embeddings.weight",),
        ),
        *weight_and_bias(f"{LANGUAGE_MODEL}embedding.norm", "copy", f"{_EMBEDDINGS}LayerNorm"),
        *weight_and_bias(
            f"{LAYER}self_attention.linear_qkv",
            "qkv",
            *(f"{_HF_LAYER}attention.self.{name}" for name in ("query", "key", "value")),
        ),
        *weight_and_bias(f"{LAYER}self_attention.linear_proj", "copy", f"{_HF_LAYER}attention.output.dense"),
        *weight_and_bias(f"{LAYER}post_self_attn_layernorm", "copy", f"{_HF_LAYER}attention.output.LayerNorm"),
        *weight_and_bias(f"{LAYER}mlp.linear_fc1", "copy", f"{_HF_LAYER}intermediate.dense"),
        *weight_and_bias(f"{LAYER}mlp.linear_fc2", "copy", f"{_HF_LAYER}output.dense"),
        *weight_and_bias(f"{LAYER}post_mlp_layernorm", "copy", f"{_HF_LAYER}output.LayerNorm"),
        *weight_and_bias("lm_head.dense", "copy", f"{_LM_HEAD}transform.dense"),
        *weight_and_bias("lm_head.norm", "copy", f"{_LM_HEAD}transform.LayerNorm"),
        ParamMapping("word_bias.bias", "copy", (f"{_LM_HEAD}bias",)),
        *weight_and_bias("pooler.dense", "copy", "bert.pooler.dense"),
        *weight_and_bias("binary_head", "copy", "cls.seq_relationship"),
        ParamMapping(f"{OUTPUT_LAYER}.weight", "copy", (f"{_LM_HEAD}decoder.weight",)),
    ),
    ignored_tensors=(r"bert\.embeddings\.position_ids", r"cls\.predictions\.decoder\.bias"),
    vocab_size=30522,
    model="BertModel",
    old_suffixes=(("LayerNorm.gamma", "LayerNorm.weight"), ("LayerNorm.beta", "LayerNorm.bias")),
    tied_copies=((f"{_LM_HEAD}decoder.bias", f"{_LM_HEAD}bias"),),
    heads=(
        Head(("lm_head.", "word_bias."), (*NO_LM_HEAD, "ForNextSentencePrediction")),
        Head(("binary_head.",), (*NO_LM_HEAD, "ForMaskedLM", "LMHeadModel")),
        Head(("pooler.",), ("ForMaskedLM", "LMHeadModel", "ForTokenClassification", "ForQuestionAnswering")),
    ),
)
