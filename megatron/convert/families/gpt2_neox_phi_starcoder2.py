"""Tables of the families with LayerNorm and biases: GPT-2, GPT-NeoX (Pythia), Phi 1 and 2, StarCoder 2."""

from typing import Any

from megatron.convert.families.config_fields import (
    ConfigReader,
    Field,
    boolean,
    count,
    dropout_rate,
    fixed_not_written,
    heads,
    ignored_keys,
    number,
    repeated,
)
from megatron.convert.families.hf_family_fields_and_param_mappings import (
    LANGUAGE_MODEL,
    LAYER,
    NOT_ENCODER_DECODER,
    OUTPUT_LAYER,
    UNUSED_KEYS,
    WORD_EMBEDDINGS,
    Family,
    ParamMapping,
    activation,
    weight_and_bias,
)
from megatron.convert.families.llama_like import EMBEDDING_NORM_AND_HEAD
from megatron.convert.families.rope import rope
from megatron.convert.families.sliding_window import windows


def _attention_scale() -> Field:
    """GPT-2's scale of attention scores: they may be unscaled, or divided by the layer's number too."""
    by_width = "scale_attn_weights"
    by_layer = "scale_attn_by_inverse_layer_idx"

    def read(reader: ConfigReader) -> dict[str, Any]:
        settings: dict[str, Any] = {}
        if not reader.choice(by_width, True, (False, True)):
            settings["softmax_scale"] = 1.0
        settings[by_layer] = reader.choice(by_layer, False, (False, True))
        return settings

    def write(model: Any) -> dict[str, Any]:
        return {by_width: model.softmax_scale is None, by_layer: model.scale_attn_by_inverse_layer_idx}

    return Field((by_width, by_layer), read, write)


_GPT2_LAYER = "transformer.h.{i}."
GPT2 = Family(
    "GPT2LMHeadModel",
    {"normalization": "LayerNorm", "position_embedding_type": "learned_absolute"},
    (
        count("n_embd", "hidden_size", 768),
        count("n_layer", "num_layers", 12),
        count("n_inner", "ffn_hidden_size", None, value_from="ffn_size"),
        count("n_positions", "max_position_embeddings", 1024),
        count("n_head", "num_attention_heads", 12),
        number("layer_norm_epsilon", "norm_epsilon", 1e-5),
        activation("activation_function", "gelu_new", gated=False),
        _attention_scale(),
        boolean("tie_word_embeddings", "untie_embeddings_and_output_weights", True, opposite=True),
        dropout_rate("resid_pdrop", "hidden_dropout", 0.1),
        dropout_rate("attn_pdrop", "attention_dropout", 0.1),
        *NOT_ENCODER_DECODER,
        repeated("hidden_size", "n_embd", 768),
        repeated("num_hidden_layers", "n_layer", 12),
        repeated("num_attention_heads", "n_head", 12),
        repeated("max_position_embeddings", "n_positions", 1024),
        ignored_keys("n_ctx", "reorder_and_upcast_attn"),
        ignored_keys("n_special", "predict_special_tokens"),  # of the first files: tokens that a user had added
        ignored_keys(*(f"summary_{x}" for x in ("type", "use_proj", "activation", "proj_to_labels", "first_dropout"))),
        UNUSED_KEYS,
    ),
    (
        ParamMapping(WORD_EMBEDDINGS, "copy", ("transformer.wte.weight",)),
        ParamMapping(f"{LANGUAGE_MODEL}embedding.position_embeddings.weight", "copy", ("transformer.wpe.weight",)),
        *weight_and_bias(f"{LAYER}input_layernorm", "copy", f"{_GPT2_LAYER}ln_1"),
        *weight_and_bias(f"{LAYER}self_attention.linear_qkv", "qkv_transpose", f"{_GPT2_LAYER}attn.c_attn"),
        *weight_and_bias(f"{LAYER}self_attention.linear_proj", "transpose", f"{_GPT2_LAYER}attn.c_proj"),
        *weight_and_bias(f"{LAYER}pre_mlp_layernorm", "copy", f"{_GPT2_LAYER}ln_2"),
        *weight_and_bias(f"{LAYER}mlp.linear_fc1", "transpose", f"{_GPT2_LAYER}mlp.c_fc"),
        *weight_and_bias(f"{LAYER}mlp.linear_fc2", "transpose", f"{_GPT2_LAYER}mlp.c_proj"),
        *weight_and_bias(f"{LANGUAGE_MODEL}decoder.final_layernorm", "copy", "transformer.ln_f"),
        *weight_and_bias(OUTPUT_LAYER, "copy", "lm_head"),
    ),
    ignored_tensors=(r"transformer\.h\.\d+\.attn\.(masked_)?bias",),
    vocab_size=50257,
)


def _sizes(length: int, tied: bool, epsilon_key: str) -> tuple[Field, ...]:
    """Return fields of sizes. length, tied: the class's own defaults. epsilon_key: the key of the norms' epsilon."""
    return (
        count("hidden_size", "hidden_size"),
        count("num_hidden_layers", "num_layers"),
        count("intermediate_size", "ffn_hidden_size", value_from="ffn_size"),
        count("max_position_embeddings", "max_position_embeddings", length),
        number(epsilon_key, "norm_epsilon", 1e-5),
        boolean("tie_word_embeddings", "untie_embeddings_and_output_weights", tied, opposite=True),
        *NOT_ENCODER_DECODER,
        UNUSED_KEYS,
    )


def _parallel_residual() -> Field:
    key = "use_parallel_residual"

    def read(reader: ConfigReader) -> dict[str, Any]:
        is_parallel = reader.choice(key, True, (False, True))
        return {"norm_placement": "parallel" if is_parallel else "pre"}

    return Field((key,), read, lambda model: {key: model.norm_placement == "parallel"})


def _attention_biases(key: str) -> Field:
    """A switch for the biases of attention alone; the MLP always has its biases."""

    def read(reader: ConfigReader) -> dict[str, Any]:
        if reader.choice(key, True, (False, True)):
            return {}
        return {"add_bias_linear": False, "add_mlp_bias": True}

    return Field((key,), read, lambda model: {key: model.has_qkv_bias})


_LAYERNORM_AND_ROPE = {"normalization": "LayerNorm", "position_embedding_type": "rope"}
_NEOX_LAYER = "gpt_neox.layers.{i}."
GPT_NEOX = Family(
    "GPTNeoXForCausalLM",
    _LAYERNORM_AND_ROPE,
    (
        *_sizes(2048, False, "layer_norm_eps"),
        count("num_attention_heads", "num_attention_heads"),
        activation("hidden_act", "gelu", gated=False),
        rope(partial=0.25, theta_key="rotary_emb_base", partial_key="rotary_pct"),
        _parallel_residual(),
        _attention_biases("attention_bias"),
        dropout_rate("hidden_dropout", "hidden_dropout"),
        dropout_rate("attention_dropout", "attention_dropout"),
        ignored_keys("hidden_dropout_prob", "attention_probs_dropout_prob"),  # of GPT-NeoX-20B
    ),
    (
        ParamMapping(WORD_EMBEDDINGS, "copy", ("gpt_neox.embed_in.weight",)),
        *weight_and_bias(f"{LAYER}input_layernorm", "copy", f"{_NEOX_LAYER}input_layernorm"),
        *weight_and_bias(f"{LAYER}self_attention.linear_qkv", "copy", f"{_NEOX_LAYER}attention.query_key_value"),
        *weight_and_bias(f"{LAYER}self_attention.linear_proj", "copy", f"{_NEOX_LAYER}attention.dense"),
        *weight_and_bias(f"{LAYER}pre_mlp_layernorm", "copy", f"{_NEOX_LAYER}post_attention_layernorm"),
        *weight_and_bias(f"{LAYER}mlp.linear_fc1", "copy", f"{_NEOX_LAYER}mlp.dense_h_to_4h"),
        *weight_and_bias(f"{LAYER}mlp.linear_fc2", "copy", f"{_NEOX_LAYER}mlp.dense_4h_to_h"),
        *weight_and_bias(f"{LANGUAGE_MODEL}decoder.final_layernorm", "copy", "gpt_neox.final_layer_norm"),
        *weight_and_bias(OUTPUT_LAYER, "copy", "embed_out"),
    ),
    ignored_tensors=(r"gpt_neox\.layers\.\d+\.attention\.((masked_)?bias|rotary_emb\.inv_freq)",),
)

_HF_LAYER = "model.layers.{i}."
_NORM_AND_QKV = (
    *weight_and_bias(f"{LAYER}input_layernorm", "copy", f"{_HF_LAYER}input_layernorm"),
    *weight_and_bias(f"{LAYER}self_attention.linear_qkv", "qkv", *(f"{_HF_LAYER}self_attn.{x}_proj" for x in "qkv")),
)
PHI = Family(
    "PhiForCausalLM",
    _LAYERNORM_AND_ROPE | {"norm_placement": "parallel-one-norm", "add_output_bias": True},
    (
        *_sizes(2048, False, "layer_norm_eps"),
        heads("num_attention_heads", "num_key_value_heads", None),
        activation("hidden_act", "gelu_new", gated=False),
        rope(partial=0.5),
        boolean("qk_layernorm", "qk_layernorm", False),
        dropout_rate("resid_pdrop", "hidden_dropout"),
        dropout_rate("attention_dropout", "attention_dropout"),
    ),
    (
        *(mapping for mapping in EMBEDDING_NORM_AND_HEAD if not mapping.param.startswith(f"{LANGUAGE_MODEL}decoder.")),
        *weight_and_bias(f"{LANGUAGE_MODEL}decoder.final_layernorm", "copy", "model.final_layernorm"),
        *_NORM_AND_QKV,
        *weight_and_bias(f"{LAYER}self_attention.linear_proj", "copy", f"{_HF_LAYER}self_attn.dense"),
        *weight_and_bias(f"{LAYER}self_attention.q_layernorm", "copy", f"{_HF_LAYER}self_attn.q_layernorm"),
        *weight_and_bias(f"{LAYER}self_attention.k_layernorm", "copy", f"{_HF_LAYER}self_attn.k_layernorm"),
        *weight_and_bias(f"{LAYER}mlp.linear_fc1", "copy", f"{_HF_LAYER}mlp.fc1"),
        *weight_and_bias(f"{LAYER}mlp.linear_fc2", "copy", f"{_HF_LAYER}mlp.fc2"),
    ),
)
STARCODER2 = Family(
    "Starcoder2ForCausalLM",
    _LAYERNORM_AND_ROPE,
    (
        *_sizes(4096, True, "norm_epsilon"),
        heads("num_attention_heads", "num_key_value_heads", None, default_groups=2),
        activation("hidden_act", "gelu_pytorch_tanh", gated=False),
        rope(),
        windows(None, lists=False),
        boolean("use_bias", "add_bias_linear", True),
        # keys of published files, which transformers does not read
        fixed_not_written("mlp_type", "default"),
        fixed_not_written("norm_type", "layer_norm"),
        fixed_not_written("scale_attn_weights", True),
        ignored_keys("rms_norm_eps", "layer_norm_epsilon"),
        ignored_keys("attention_softmax_in_fp32", "scale_attention_softmax_in_fp32"),
        dropout_rate("residual_dropout", "hidden_dropout"),
        dropout_rate("attention_dropout", "attention_dropout"),
    ),
    (
        *EMBEDDING_NORM_AND_HEAD,
        *_NORM_AND_QKV,
        *weight_and_bias(f"{LAYER}self_attention.linear_proj", "copy", f"{_HF_LAYER}self_attn.o_proj"),
        *weight_and_bias(f"{LAYER}pre_mlp_layernorm", "copy", f"{_HF_LAYER}post_attention_layernorm"),
        *weight_and_bias(f"{LAYER}mlp.linear_fc1", "copy", f"{_HF_LAYER}mlp.c_fc"),
        *weight_and_bias(f"{LAYER}mlp.linear_fc2", "copy", f"{_HF_LAYER}mlp.c_proj"),
    ),
)
