"""The families of models that other libraries have, as tables: names and shapes of tensors, fields of config.json.

A family is one `Family`: the settings that all its models have, the fields of its config.json, and a row for each tensor of
ours, `(ours, operation, theirs...)`, with {i} for a layer. To add one: a file with its table, and a line in FAMILIES.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from megatron.core.interchange.fields import Field, always, count, heads, number, only, share, switch, unused
from megatron.core.interchange.rope import rope
from megatron.core.open_table import Table


class Row(NamedTuple):
    """One tensor of ours, and the tensors of theirs that it is made of."""

    ours: str
    operation: str
    theirs: tuple[str, ...]


@dataclass(frozen=True)
class Family:
    """One family: how its models are described and stored.

    architecture: the class that transformers builds. settings: what all its models have, by names of `ModelConfig`.
    ignored: names of tensors, as regular expressions, that hold nothing to learn. prefix: of names, which
    some old files leave out. vocab_size: the class's own, where a config.json says none.
    """

    architecture: str
    settings: Mapping[str, Any]
    fields: tuple[Field, ...]
    rows: tuple[Row, ...]
    ignored: tuple[str, ...] = ()
    prefix: str = ""
    vocab_size: int | None = None


def both(ours: str, operation: str, *theirs: str) -> Iterator[Row]:
    """The rows of a weight and of a bias, which only some models of a family have."""
    plain = {"transpose": "copy", "qkv_transpose": "qkv_rows"}
    for part, how in (("weight", operation), ("bias", plain.get(operation, operation))):
        yield Row(f"{ours}.{part}", how, tuple(f"{name}.{part}" for name in theirs))


# What a config.json says of how a model was trained, stored or is used, but not of what it computes.
ABOUT = unused(
    *("model_type", "architectures", "transformers_version", "_name_or_path", "torch_dtype", "dtype", "use_cache"),
    *("bos_token_id", "eos_token_id", "pad_token_id", "initializer_range", "pretraining_tp"),
    *("auto_map", "_attn_implementation", "output_attentions", "output_hidden_states", "return_dict", "name_or_path"),
    *("chunk_size_feed_forward", "problem_type", "id2label", "label2id", "finetuning_task", "task_specific_params"),
    *("tokenizer_class", "prefix", "sep_token_id", "decoder_start_token_id", "tie_encoder_decoder", "torchscript"),
)
NOT_ENCODERS = (
    *(only(name, False) for name in ("is_encoder_decoder", "add_cross_attention", "is_decoder", "use_bfloat16")),
    only("pruned_heads", {}),
)
RMS = {"normalization": "RMSNorm", "add_bias_linear": False, "hidden_dropout": 0.0}
ROTARY = {"position_embedding_type": "rope"}

_STAGE = "language_model."
_LAYER = f"{_STAGE}decoder.layers.{{i}}."
_LLAMA_LAYER = "model.layers.{i}."

EMBEDDING = Row(f"{_STAGE}embedding.word_embeddings.weight", "copy", ("model.embed_tokens.weight",))
HEAD = Row(f"{_STAGE}output_layer.weight", "copy", ("lm_head.weight",))
LLAMA_ROWS = (
    EMBEDDING,
    *both(f"{_LAYER}input_layernorm", "copy", f"{_LLAMA_LAYER}input_layernorm"),
    *both(f"{_LAYER}self_attention.linear_qkv", "qkv", *(f"{_LLAMA_LAYER}self_attn.{x}_proj" for x in "qkv")),
    *both(f"{_LAYER}self_attention.linear_proj", "copy", f"{_LLAMA_LAYER}self_attn.o_proj"),
    *both(f"{_LAYER}pre_mlp_layernorm", "copy", f"{_LLAMA_LAYER}post_attention_layernorm"),
    *both(f"{_LAYER}mlp.linear_fc1", "gate_up", f"{_LLAMA_LAYER}mlp.gate_proj", f"{_LLAMA_LAYER}mlp.up_proj"),
    *both(f"{_LAYER}mlp.linear_fc2", "copy", f"{_LLAMA_LAYER}mlp.down_proj"),
    *both(f"{_STAGE}decoder.final_layernorm", "copy", "model.norm"),
    HEAD,
)
SIZES = (
    count("hidden_size", "hidden_size"),
    count("num_hidden_layers", "num_layers"),
    count("intermediate_size", "ffn_hidden_size", said_by="ffn_size"),
    count("max_position_embeddings", "max_position_embeddings", 2048),
)
LLAMA = Family(
    "LlamaForCausalLM",
    {**RMS, **ROTARY, "swiglu": True},
    (
        *SIZES,
        heads("num_attention_heads", "num_key_value_heads", "head_dim"),
        number("rms_norm_eps", "norm_epsilon", 1e-6),
        always("hidden_act", "silu"),
        rope(),
        switch("tie_word_embeddings", "untie_embeddings_and_output_weights", False, opposite=True),
        always("attention_bias", False),
        always("mlp_bias", False),
        share("attention_dropout", "attention_dropout"),
        *NOT_ENCODERS,
        ABOUT,
    ),
    LLAMA_ROWS,
    (r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq",),
)

_GPT2_LAYER = "transformer.h.{i}."
GPT2 = Family(
    "GPT2LMHeadModel",
    {"normalization": "LayerNorm", "add_bias_linear": True, "position_embedding_type": "learned_absolute"},
    (
        count("n_embd", "hidden_size", 768),
        count("n_layer", "num_layers", 12),
        count("n_inner", "ffn_hidden_size", None, said_by="ffn_size"),
        count("n_positions", "max_position_embeddings", 1024),
        count("n_head", "num_attention_heads", 12),
        number("layer_norm_epsilon", "norm_epsilon", 1e-5),
        always("activation_function", "gelu_new", "gelu_pytorch_tanh"),
        always("scale_attn_weights", True),
        always("scale_attn_by_inverse_layer_idx", False),
        switch("tie_word_embeddings", "untie_embeddings_and_output_weights", True, opposite=True),
        *NOT_ENCODERS,
        share("resid_pdrop", "hidden_dropout", 0.1),
        share("attn_pdrop", "attention_dropout", 0.1),
        unused("n_ctx", "embd_pdrop", "reorder_and_upcast_attn"),
        unused(*(f"summary_{x}" for x in ("type", "use_proj", "activation", "proj_to_labels", "first_dropout"))),
        ABOUT,
    ),
    (
        Row(f"{_STAGE}embedding.word_embeddings.weight", "copy", ("transformer.wte.weight",)),
        Row(f"{_STAGE}embedding.position_embeddings.weight", "copy", ("transformer.wpe.weight",)),
        *both(f"{_LAYER}input_layernorm", "copy", f"{_GPT2_LAYER}ln_1"),
        *both(f"{_LAYER}self_attention.linear_qkv", "qkv_transpose", f"{_GPT2_LAYER}attn.c_attn"),
        *both(f"{_LAYER}self_attention.linear_proj", "transpose", f"{_GPT2_LAYER}attn.c_proj"),
        *both(f"{_LAYER}pre_mlp_layernorm", "copy", f"{_GPT2_LAYER}ln_2"),
        *both(f"{_LAYER}mlp.linear_fc1", "transpose", f"{_GPT2_LAYER}mlp.c_fc"),
        *both(f"{_LAYER}mlp.linear_fc2", "transpose", f"{_GPT2_LAYER}mlp.c_proj"),
        *both(f"{_STAGE}decoder.final_layernorm", "copy", "transformer.ln_f"),
        HEAD,
    ),
    (r"transformer\.h\.\d+\.attn\.(masked_)?bias",),
    "transformer.",
)

FAMILIES = Table("FAMILIES", Family, {"gpt2": GPT2, "llama": LLAMA})
