"""BERT as published: norms behind the blocks and behind the embedding; heads for masked words and for the order of
sentences."""

from megatron.convert.families.config_fields import always, count, number, only, share, unused
from megatron.convert.families.family import (
    ABOUT,
    LAYER,
    NO_WORDS,
    OUTPUT,
    STAGE,
    WORD_TABLE,
    Family,
    Head,
    Row,
    activation,
    both,
)

_TABLES, _HEAD = "bert.embeddings.", "cls.predictions."
_THEIRS = "bert.encoder.layer.{i}."

BERT = Family(
    "BertForPreTraining",
    {"normalization": "LayerNorm", "position_embedding_type": "learned_absolute", "norm_placement": "post"},
    (
        count("hidden_size", "hidden_size", 768),
        count("num_hidden_layers", "num_layers", 12),
        count("num_attention_heads", "num_attention_heads", 12),
        count("intermediate_size", "ffn_hidden_size", 3072, said_by="ffn_size"),
        count("max_position_embeddings", "max_position_embeddings", 512),
        number("layer_norm_eps", "norm_epsilon", 1e-12),
        activation("hidden_act", "gelu", gated=False),
        share("hidden_dropout_prob", "hidden_dropout", 0.1),
        share("attention_probs_dropout_prob", "attention_dropout", 0.1),
        always("type_vocab_size", 2),
        always("tie_word_embeddings", True),
        only("position_embedding_type", "absolute"),
        *(only(name, False) for name in ("is_encoder_decoder", "add_cross_attention", "is_decoder", "use_bfloat16")),
        only("pruned_heads", {}),
        only("directionality", "bidi"),
        unused("gradient_checkpointing", "pooler_fc_size", "pooler_num_attention_heads", "pooler_num_fc_layers"),
        unused("pooler_size_per_head", "pooler_type"),
        ABOUT,
    ),
    (
        Row(WORD_TABLE, "copy", (f"{_TABLES}word_embeddings.weight",)),
        Row(f"{STAGE}embedding.position_embeddings.weight", "copy", (f"{_TABLES}position_embeddings.weight",)),
        Row(f"{STAGE}embedding.tokentype_embeddings.weight", "copy", (f"{_TABLES}token_type_embeddings.weight",)),
        *both(f"{STAGE}embedding.norm", "copy", f"{_TABLES}LayerNorm"),
        *both(
            f"{LAYER}self_attention.linear_qkv",
            "qkv",
            *(f"{_THEIRS}attention.self.{name}" for name in ("query", "key", "value")),
        ),
        *both(f"{LAYER}self_attention.linear_proj", "copy", f"{_THEIRS}attention.output.dense"),
        *both(f"{LAYER}post_self_attn_layernorm", "copy", f"{_THEIRS}attention.output.LayerNorm"),
        *both(f"{LAYER}mlp.linear_fc1", "copy", f"{_THEIRS}intermediate.dense"),
        *both(f"{LAYER}mlp.linear_fc2", "copy", f"{_THEIRS}output.dense"),
        *both(f"{LAYER}post_mlp_layernorm", "copy", f"{_THEIRS}output.LayerNorm"),
        *both("lm_head.dense", "copy", f"{_HEAD}transform.dense"),
        *both("lm_head.norm", "copy", f"{_HEAD}transform.LayerNorm"),
        Row("word_bias.bias", "copy", (f"{_HEAD}bias",)),
        *both("pooler.dense", "copy", "bert.pooler.dense"),
        *both("binary_head", "copy", "cls.seq_relationship"),
        Row(f"{OUTPUT}.weight", "copy", (f"{_HEAD}decoder.weight",)),
    ),
    (r"bert\.embeddings\.position_ids", r"cls\.predictions\.decoder\.bias"),
    30522,
    "BertModel",
    (("LayerNorm.gamma", "LayerNorm.weight"), ("LayerNorm.beta", "LayerNorm.bias")),
    ((f"{_HEAD}decoder.bias", f"{_HEAD}bias"),),
    heads=(
        Head(("lm_head.", "word_bias."), (*NO_WORDS, "ForNextSentencePrediction")),
        Head(("binary_head.",), (*NO_WORDS, "ForMaskedLM", "LMHeadModel")),
        Head(("pooler.",), ("ForMaskedLM", "LMHeadModel", "ForTokenClassification", "ForQuestionAnswering")),
    ),
)
