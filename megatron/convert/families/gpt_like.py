"""Families with LayerNorm and biases: GPT-2, GPT-NeoX (Pythia), Phi 1 and 2, StarCoder 2."""

from typing import Any

from megatron.convert.families.config_fields import Field, Given, count, heads, number, only, share, switch, unused
from megatron.convert.families.family import (
    ABOUT,
    LAYER,
    NOT_ENCODERS,
    OUTPUT,
    STAGE,
    WORD_TABLE,
    Family,
    Row,
    activation,
    both,
)
from megatron.convert.families.llama_like import ENDS
from megatron.convert.families.rope import rope
from megatron.convert.families.sliding_window import windows


def _scales() -> Field:
    """GPT-2's: scores are not divided, or divided by the layer's number too."""
    scaled, layered = "scale_attn_weights", "scale_attn_by_inverse_layer_idx"

    def read(given: Given) -> dict[str, Any]:
        scale = {} if given.choice(scaled, True, (False, True)) else {"softmax_scale": 1.0}
        return scale | {layered: given.choice(layered, False, (False, True))}

    return Field(
        (scaled, layered),
        read,
        lambda model: {scaled: model.softmax_scale is None, layered: model.scale_attn_by_inverse_layer_idx},
    )


_GPT2_LAYER = "transformer.h.{i}."
GPT2 = Family(
    "GPT2LMHeadModel",
    {"normalization": "LayerNorm", "position_embedding_type": "learned_absolute"},
    (
        count("n_embd", "hidden_size", 768),
        count("n_layer", "num_layers", 12),
        count("n_inner", "ffn_hidden_size", None, said_by="ffn_size"),
        count("n_positions", "max_position_embeddings", 1024),
        count("n_head", "num_attention_heads", 12),
        number("layer_norm_epsilon", "norm_epsilon", 1e-5),
        activation("activation_function", "gelu_new", gated=False),
        _scales(),
        switch("tie_word_embeddings", "untie_embeddings_and_output_weights", True, opposite=True),
        share("resid_pdrop", "hidden_dropout", 0.1),
        share("attn_pdrop", "attention_dropout", 0.1),
        *NOT_ENCODERS,
        unused("n_ctx", "reorder_and_upcast_attn"),
        unused(*(f"summary_{x}" for x in ("type", "use_proj", "activation", "proj_to_labels", "first_dropout"))),
        ABOUT,
    ),
    (
        Row(WORD_TABLE, "copy", ("transformer.wte.weight",)),
        Row(f"{STAGE}embedding.position_embeddings.weight", "copy", ("transformer.wpe.weight",)),
        *both(f"{LAYER}input_layernorm", "copy", f"{_GPT2_LAYER}ln_1"),
        *both(f"{LAYER}self_attention.linear_qkv", "qkv_transpose", f"{_GPT2_LAYER}attn.c_attn"),
        *both(f"{LAYER}self_attention.linear_proj", "transpose", f"{_GPT2_LAYER}attn.c_proj"),
        *both(f"{LAYER}pre_mlp_layernorm", "copy", f"{_GPT2_LAYER}ln_2"),
        *both(f"{LAYER}mlp.linear_fc1", "transpose", f"{_GPT2_LAYER}mlp.c_fc"),
        *both(f"{LAYER}mlp.linear_fc2", "transpose", f"{_GPT2_LAYER}mlp.c_proj"),
        *both(f"{STAGE}decoder.final_layernorm", "copy", "transformer.ln_f"),
        *both(OUTPUT, "copy", "lm_head"),
    ),
    (r"transformer\.h\.\d+\.attn\.(masked_)?bias",),
    50257,
)


def _sizes(length: int, tied: bool, epsilon: str) -> tuple[Field, ...]:
    return (
        count("hidden_size", "hidden_size"),
        count("num_hidden_layers", "num_layers"),
        count("intermediate_size", "ffn_hidden_size", said_by="ffn_size"),
        count("max_position_embeddings", "max_position_embeddings", length),
        number(epsilon, "norm_epsilon", 1e-5),
        switch("tie_word_embeddings", "untie_embeddings_and_output_weights", tied, opposite=True),
        *NOT_ENCODERS,
        ABOUT,
    )


def _parallel() -> Field:
    key = "use_parallel_residual"

    def read(given: Given) -> dict[str, Any]:
        return {"norm_placement": "parallel" if given.choice(key, True, (False, True)) else "pre"}

    return Field((key,), read, lambda model: {key: model.norm_placement == "parallel"})


def _attention_biases(key: str) -> Field:
    """Biases of attention alone; those of the MLP are always there."""

    def read(given: Given) -> dict[str, Any]:
        has = given.choice(key, True, (False, True))
        return {} if has else {"add_bias_linear": False, "add_mlp_bias": True}

    return Field((key,), read, lambda model: {key: model.has_qkv_bias})


_ROTARY = {"normalization": "LayerNorm", "position_embedding_type": "rope"}
_NEOX_LAYER = "gpt_neox.layers.{i}."
GPT_NEOX = Family(
    "GPTNeoXForCausalLM",
    _ROTARY,
    (
        *_sizes(2048, False, "layer_norm_eps"),
        count("num_attention_heads", "num_attention_heads"),
        activation("hidden_act", "gelu", gated=False),
        rope(partial=0.25, theta_key="rotary_emb_base", partial_key="rotary_pct"),
        _parallel(),
        _attention_biases("attention_bias"),
        share("hidden_dropout", "hidden_dropout"),
        share("attention_dropout", "attention_dropout"),
        unused("hidden_dropout_prob", "attention_probs_dropout_prob"),  # of GPT-NeoX-20B
    ),
    (
        Row(WORD_TABLE, "copy", ("gpt_neox.embed_in.weight",)),
        *both(f"{LAYER}input_layernorm", "copy", f"{_NEOX_LAYER}input_layernorm"),
        *both(f"{LAYER}self_attention.linear_qkv", "copy", f"{_NEOX_LAYER}attention.query_key_value"),
        *both(f"{LAYER}self_attention.linear_proj", "copy", f"{_NEOX_LAYER}attention.dense"),
        *both(f"{LAYER}pre_mlp_layernorm", "copy", f"{_NEOX_LAYER}post_attention_layernorm"),
        *both(f"{LAYER}mlp.linear_fc1", "copy", f"{_NEOX_LAYER}mlp.dense_h_to_4h"),
        *both(f"{LAYER}mlp.linear_fc2", "copy", f"{_NEOX_LAYER}mlp.dense_4h_to_h"),
        *both(f"{STAGE}decoder.final_layernorm", "copy", "gpt_neox.final_layer_norm"),
        *both(OUTPUT, "copy", "embed_out"),
    ),
    (r"gpt_neox\.layers\.\d+\.attention\.((masked_)?bias|rotary_emb\.inv_freq)",),
)

_LAYER = "model.layers.{i}."
_PARTS = (
    *both(f"{LAYER}input_layernorm", "copy", f"{_LAYER}input_layernorm"),
    *both(f"{LAYER}self_attention.linear_qkv", "qkv", *(f"{_LAYER}self_attn.{x}_proj" for x in "qkv")),
)
PHI = Family(
    "PhiForCausalLM",
    _ROTARY | {"norm_placement": "parallel-one-norm", "add_output_bias": True},
    (
        *_sizes(2048, False, "layer_norm_eps"),
        heads("num_attention_heads", "num_key_value_heads", None),
        activation("hidden_act", "gelu_new", gated=False),
        rope(partial=0.5),
        switch("qk_layernorm", "qk_layernorm", False),
        share("resid_pdrop", "hidden_dropout"),
        share("attention_dropout", "attention_dropout"),
    ),
    (
        *(row for row in ENDS if not row.ours.startswith(f"{STAGE}decoder.")),
        *both(f"{STAGE}decoder.final_layernorm", "copy", "model.final_layernorm"),
        *_PARTS,
        *both(f"{LAYER}self_attention.linear_proj", "copy", f"{_LAYER}self_attn.dense"),
        *both(f"{LAYER}self_attention.q_layernorm", "copy", f"{_LAYER}self_attn.q_layernorm"),
        *both(f"{LAYER}self_attention.k_layernorm", "copy", f"{_LAYER}self_attn.k_layernorm"),
        *both(f"{LAYER}mlp.linear_fc1", "copy", f"{_LAYER}mlp.fc1"),
        *both(f"{LAYER}mlp.linear_fc2", "copy", f"{_LAYER}mlp.fc2"),
    ),
)
STARCODER2 = Family(
    "Starcoder2ForCausalLM",
    _ROTARY,
    (
        *_sizes(4096, True, "norm_epsilon"),
        heads("num_attention_heads", "num_key_value_heads", None, default_groups=2),
        activation("hidden_act", "gelu_pytorch_tanh", gated=False),
        rope(),
        windows(None, lists=False),
        switch("use_bias", "add_bias_linear", True),
        *(only("mlp_type", "default"), only("norm_type", "layer_norm"), unused("rms_norm_eps")),  # of published files
        share("residual_dropout", "hidden_dropout"),
        share("attention_dropout", "attention_dropout"),
    ),
    (
        *ENDS,
        *_PARTS,
        *both(f"{LAYER}self_attention.linear_proj", "copy", f"{_LAYER}self_attn.o_proj"),
        *both(f"{LAYER}pre_mlp_layernorm", "copy", f"{_LAYER}post_attention_layernorm"),
        *both(f"{LAYER}mlp.linear_fc1", "copy", f"{_LAYER}mlp.c_fc"),
        *both(f"{LAYER}mlp.linear_fc2", "copy", f"{_LAYER}mlp.c_proj"),
    ),
)
