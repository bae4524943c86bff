"""Table of T5, versions 1.0 and 1.1: encoder and decoder, relative positions, cross attention."""

from collections.abc import Mapping
from typing import Any

from megatron.convert.families.config_fields import (
    ConfigReader,
    Field,
    count,
    dropout_rate,
    fixed,
    fixed_not_written,
    ignored_keys,
    number,
    repeated,
)
from megatron.convert.families.hf_family_fields_and_param_mappings import (
    LANGUAGE_MODEL,
    OUTPUT_LAYER,
    START_ID,
    UNUSED_KEYS,
    WORD_EMBEDDINGS,
    Family,
    ParamMapping,
)

# feed_forward_proj -> our settings. The published gated models mean the tanh form by "gelu", and transformers computes it.
_MLPS: dict[str, dict[str, Any]] = {
    "relu": {"activation": "relu", "gated": False},
    "gated-gelu": {"activation": "gelu-tanh", "gated": True},
}
_ACTIVATIONS = {"relu": "relu", "gated-gelu": "gelu_new"}  # feed_forward_proj -> dense_act_fn


def _mlp() -> Field:
    """The activation; dense_act_fn and is_gated_act repeat what feed_forward_proj says."""
    key = "feed_forward_proj"

    def read(reader: ConfigReader) -> dict[str, Any]:
        kind = reader.choice(key, "relu", tuple(_MLPS))
        activation = _ACTIVATIONS[kind]
        is_gated = kind.startswith("gated")
        reader.choice("dense_act_fn", activation, (activation,))
        reader.choice("is_gated_act", is_gated, (is_gated,))
        return _MLPS[kind]

    def write(model: Any) -> dict[str, Any]:
        settings = {"activation": model.activation, "gated": model.gated}
        kind = next((name for name, mlp in _MLPS.items() if mlp == settings), "relu")
        return {key: kind, "dense_act_fn": _ACTIVATIONS[kind], "is_gated_act": kind.startswith("gated")}

    return Field((key, "dense_act_fn", "is_gated_act"), read, write)


_TIED = "tie_word_embeddings"
_SCALED = "scale_decoder_outputs"


def _output_layer() -> Field:
    """The tie of output layer and word embeddings.

    With it goes the division of the output layer's input by the root of the width.

    Models of version 1.1 have an output layer of their own: transformers 4 writes tie_word_embeddings false for them.
    transformers 5 ties every model that it initializes, and writes scale_decoder_outputs false for those of 1.1; a
    model that it has loaded may have an output layer of its own all the same.
    """

    def read(reader: ConfigReader) -> dict[str, Any]:
        is_tied = reader.choice(_TIED, True, (False, True))
        is_scaled = reader.choice(_SCALED, is_tied, (False, True) if is_tied else (False,))
        return {"untie_embeddings_and_output_weights": not is_tied, "scale_decoder_outputs": is_scaled or not is_tied}

    def write(model: Any) -> dict[str, Any]:
        is_tied = not model.untie_embeddings_and_output_weights
        return {_TIED: is_tied, _SCALED: is_tied and model.scale_decoder_outputs}

    return Field((_TIED, _SCALED), read, write)


def _untied_config(config: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the config.json as one with an output layer of its own, if only the weights can tell; else None."""
    if config.get(_TIED) is True and config.get(_SCALED) is False:
        return {**config, _TIED: False}
    return None


def _decoder_layers() -> Field:
    key = "num_decoder_layers"

    def read(reader: ConfigReader) -> dict[str, Any]:
        return {"decoder_num_layers": reader.count(key, reader.count("num_layers", 6))}

    return Field((key,), read, lambda model: {key: model.decoder_layers})


def _start_id() -> Field:
    """The id that a decoder's input begins with.

    It is no setting of the model: a folder's own is kept (hf_provenance_and_tokenizer_files.py).
    """

    def read(reader: ConfigReader) -> dict[str, Any]:
        start_id = reader.get(START_ID, 0)  # 0: the padding token of the published models
        if type(start_id) is not int or not 0 <= start_id < reader.count("vocab_size", _VOCAB_SIZE):
            raise reader.error(START_ID, "it must be the id of a word, from 0 to vocab_size - 1")
        return {}

    return Field((START_ID,), read, lambda model: {START_ID: 0})


_VOCAB_SIZE = 32128  # of a config.json without vocab_size
_ENCODER = f"{LANGUAGE_MODEL}encoder.layers.{{i}}."
_DECODER = f"{LANGUAGE_MODEL}decoder.layers.{{j}}."
_HF_ENCODER = "encoder.block.{i}.layer."
_HF_DECODER = "decoder.block.{j}.layer."


def _weight(module: str, operation: str, *hf_modules: str, gated: bool | None = None) -> ParamMapping:
    return ParamMapping(f"{module}.weight", operation, tuple(f"{name}.weight" for name in hf_modules), gated)


def _layer(ours: str, hf_layer: str, mlp_index: int) -> tuple[ParamMapping, ...]:
    """Return the mappings of a layer's self attention and MLP.

    mlp_index: the MLP's position among the layer's sublayers.
    """
    attention = f"{hf_layer}0.SelfAttention."
    mlp = f"{hf_layer}{mlp_index}.DenseReluDense."
    return (
        _weight(f"{ours}input_layernorm", "copy", f"{hf_layer}0.layer_norm"),
        _weight(f"{ours}self_attention.linear_qkv", "qkv", *(attention + x for x in "qkv")),
        _weight(f"{ours}self_attention.linear_proj", "copy", f"{attention}o"),
        _weight(f"{ours}pre_mlp_layernorm", "copy", f"{hf_layer}{mlp_index}.layer_norm"),
        _weight(f"{ours}mlp.linear_fc1", "copy", f"{mlp}wi", gated=False),
        _weight(f"{ours}mlp.linear_fc1", "gate_up", f"{mlp}wi_0", f"{mlp}wi_1", gated=True),
        _weight(f"{ours}mlp.linear_fc2", "copy", f"{mlp}wo"),
    )


_CROSS = f"{_HF_DECODER}1.EncDecAttention."
_RELATIVE_BIAS = "block.0.layer.0.SelfAttention.relative_attention_bias"

T5 = Family(
    "T5ForConditionalGeneration",
    {"position_embedding_type": "relative", "normalization": "RMSNorm", "add_bias_linear": False, "softmax_scale": 1.0},
    (
        count("d_model", "hidden_size", 512),
        count("d_kv", "kv_channels", 64, value_from="head_width"),
        count("d_ff", "ffn_hidden_size", 2048, value_from="ffn_size"),
        count("num_layers", "num_layers", 6),
        _decoder_layers(),
        count("num_heads", "num_attention_heads", 8),
        count("relative_attention_num_buckets", "relative_attention_num_buckets", 32),
        count("relative_attention_max_distance", "relative_attention_max_distance", 128),
        number("layer_norm_epsilon", "norm_epsilon", 1e-6),
        dropout_rate("dropout_rate", "hidden_dropout", 0.1),
        _mlp(),
        _output_layer(),
        fixed("is_encoder_decoder", True),
        _start_id(),
        *(fixed_not_written(name, False) for name in ("add_cross_attention", "is_decoder", "use_bfloat16")),
        fixed_not_written("pruned_heads", {}),
        fixed_not_written("per_layer_config", {}),
        fixed_not_written("tie_encoder_decoder", False),
        repeated("hidden_size", "d_model", 512),
        repeated("head_dim", "d_kv", 64),
        repeated("num_hidden_layers", "num_layers", 6),
        repeated("num_attention_heads", "num_heads", 8),
        ignored_keys("initializer_factor", "n_positions"),
        UNUSED_KEYS,
    ),
    (
        ParamMapping(WORD_EMBEDDINGS, "copy", ("shared.weight",)),
        _weight(f"{LANGUAGE_MODEL}encoder_relative_pos_emb", "copy", f"encoder.{_RELATIVE_BIAS}"),
        _weight(f"{LANGUAGE_MODEL}decoder_relative_pos_emb", "copy", f"decoder.{_RELATIVE_BIAS}"),
        *_layer(_ENCODER, _HF_ENCODER, 1),
        *_layer(_DECODER, _HF_DECODER, 2),
        _weight(f"{_DECODER}pre_cross_attn_layernorm", "copy", f"{_HF_DECODER}1.layer_norm"),
        _weight(f"{_DECODER}cross_attention.linear_q", "copy", f"{_CROSS}q"),
        _weight(f"{_DECODER}cross_attention.linear_kv", "kv", f"{_CROSS}k", f"{_CROSS}v"),
        _weight(f"{_DECODER}cross_attention.linear_proj", "copy", f"{_CROSS}o"),
        _weight(f"{LANGUAGE_MODEL}encoder.final_layernorm", "copy", "encoder.final_layer_norm"),
        _weight(f"{LANGUAGE_MODEL}decoder.final_layernorm", "copy", "decoder.final_layer_norm"),
        _weight(OUTPUT_LAYER, "copy", "lm_head"),
    ),
    # Copies of the word embeddings (see tied_copies), and a bias that old files have although their model does not use it.
    ignored_tensors=(
        r"(encoder|decoder)\.embed_tokens\.weight",
        r"decoder\.block\.0\.layer\.1\.EncDecAttention\.relative_attention_bias\.weight",
    ),
    vocab_size=_VOCAB_SIZE,
    model="T5Model",
    tied_copies=tuple((f"{stack}.embed_tokens.weight", "shared.weight") for stack in ("encoder", "decoder")),
    untied_config=_untied_config,
)
