"""T5, versions 1.0 and 1.1: two stacks, relative positions, attention from the decoder to the encoder."""

from collections.abc import Mapping
from typing import Any

from megatron.convert.families.config_fields import Field, Given, always, count, number, only, share, unused
from megatron.convert.families.family import ABOUT, OUTPUT, STAGE, START_ID, WORD_TABLE, Family, Row

# feed_forward_proj -> our settings. The published gated models mean the tanh form by "gelu", and transformers computes it.
_MLPS: dict[str, dict[str, Any]] = {
    "relu": {"activation": "relu", "gated": False},
    "gated-gelu": {"activation": "gelu-tanh", "gated": True},
}
_ACTIVATIONS = {"relu": "relu", "gated-gelu": "gelu_new"}


def _mlp() -> Field:
    """The activation; two further keys repeat what the first says."""
    key, parts = "feed_forward_proj", ("dense_act_fn", "is_gated_act")

    def written(model: Any) -> dict[str, Any]:
        mine = {"activation": model.activation, "gated": model.gated}
        found = next((name for name, settings in _MLPS.items() if settings == mine), "relu")
        return {key: found, "dense_act_fn": _ACTIVATIONS[found], "is_gated_act": found.startswith("gated")}

    def read(given: Given) -> dict[str, Any]:
        found = given.choice(key, "relu", tuple(_MLPS))
        given.choice(parts[0], _ACTIVATIONS[found], (_ACTIVATIONS[found],))
        given.choice(parts[1], found.startswith("gated"), (found.startswith("gated"),))
        return _MLPS[found]

    return Field((key, *parts), read, written)


_TIED, _SCALED = "tie_word_embeddings", "scale_decoder_outputs"


def _head() -> Field:
    """Whether the output layer is the word table, and its input then divided by the root of the width.

    Of version 1.1, whose models have an output layer of their own, transformers 4 says tie_word_embeddings false. 5 ties
    every
    model that it makes, and says scale_decoder_outputs false of these; one that it has read may have a head all the same.
    """

    def read(given: Given) -> dict[str, Any]:
        is_tied = given.choice(_TIED, True, (False, True))
        is_scaled = given.choice(_SCALED, is_tied, (False, True) if is_tied else (False,))
        return {"untie_embeddings_and_output_weights": not is_tied, "scale_decoder_outputs": is_scaled or not is_tied}

    def written(model: Any) -> dict[str, Any]:
        is_tied = not model.untie_embeddings_and_output_weights
        return {_TIED: is_tied, _SCALED: is_tied and model.scale_decoder_outputs}

    return Field((_TIED, _SCALED), read, written)


def _untied(config: Mapping[str, Any]) -> dict[str, Any] | None:
    return {**config, _TIED: False} if config.get(_TIED) is True and config.get(_SCALED) is False else None


def _decoder_layers() -> Field:
    key = "num_decoder_layers"
    read = lambda given: {"decoder_num_layers": given.count(key, given.count("num_layers", 6))}  # noqa: E731
    return Field((key,), read, lambda model: {key: model.decoder_layers})


def _start() -> Field:
    """The id that a decoder's texts begin with. It is no setting of the model: a folder's own is kept (hf_origin.py)."""

    def read(given: Given) -> dict[str, Any]:
        found = given.get(START_ID, 0)  # 0: the padding token of the published models
        if type(found) is not int or not 0 <= found < given.count("vocab_size", _WORDS):
            raise given.wrong(START_ID, "it must be the id of a word, from 0 to vocab_size - 1")
        return {}

    return Field((START_ID,), read, lambda model: {START_ID: 0})


_WORDS = 32128  # where vocab_size is not said
_ENCODER, _DECODER = f"{STAGE}encoder.layers.{{i}}.", f"{STAGE}decoder.layers.{{j}}."
_THEIR_ENCODER, _THEIR_DECODER = "encoder.block.{i}.layer.", "decoder.block.{j}.layer."


def _weight(ours: str, operation: str, *theirs: str, gated: bool | None = None) -> Row:
    return Row(f"{ours}.weight", operation, tuple(f"{name}.weight" for name in theirs), gated)


def _layer(ours: str, theirs: str, last: int) -> tuple[Row, ...]:
    """A layer's own attention and MLP. last: the number of the MLP among its parts."""
    attention, mlp = f"{theirs}0.SelfAttention.", f"{theirs}{last}.DenseReluDense."
    return (
        _weight(f"{ours}input_layernorm", "copy", f"{theirs}0.layer_norm"),
        _weight(f"{ours}self_attention.linear_qkv", "qkv", *(attention + x for x in "qkv")),
        _weight(f"{ours}self_attention.linear_proj", "copy", f"{attention}o"),
        _weight(f"{ours}pre_mlp_layernorm", "copy", f"{theirs}{last}.layer_norm"),
        _weight(f"{ours}mlp.linear_fc1", "copy", f"{mlp}wi", gated=False),
        _weight(f"{ours}mlp.linear_fc1", "gate_up", f"{mlp}wi_0", f"{mlp}wi_1", gated=True),
        _weight(f"{ours}mlp.linear_fc2", "copy", f"{mlp}wo"),
    )


_CROSS = f"{_THEIR_DECODER}1.EncDecAttention."
_TABLE = "block.0.layer.0.SelfAttention.relative_attention_bias"

T5 = Family(
    "T5ForConditionalGeneration",
    {
        **{"position_embedding_type": "relative", "normalization": "RMSNorm", "add_bias_linear": False},
        "softmax_scale": 1.0,
    },
    (
        count("d_model", "hidden_size", 512),
        count("d_kv", "kv_channels", 64, said_by="head_width"),
        count("d_ff", "ffn_hidden_size", 2048, said_by="ffn_size"),
        count("num_layers", "num_layers", 6),
        _decoder_layers(),
        count("num_heads", "num_attention_heads", 8),
        count("relative_attention_num_buckets", "relative_attention_num_buckets", 32),
        count("relative_attention_max_distance", "relative_attention_max_distance", 128),
        number("layer_norm_epsilon", "norm_epsilon", 1e-6),
        share("dropout_rate", "hidden_dropout", 0.1),
        _mlp(),
        _head(),
        always("is_encoder_decoder", True),
        _start(),
        *(only(name, False) for name in ("add_cross_attention", "is_decoder", "use_bfloat16")),
        unused("initializer_factor", "n_positions", "output_past"),
        ABOUT,
    ),
    (
        Row(WORD_TABLE, "copy", ("shared.weight",)),
        _weight(f"{STAGE}encoder_relative_pos_emb", "copy", f"encoder.{_TABLE}"),
        _weight(f"{STAGE}decoder_relative_pos_emb", "copy", f"decoder.{_TABLE}"),
        *_layer(_ENCODER, _THEIR_ENCODER, 1),
        *_layer(_DECODER, _THEIR_DECODER, 2),
        _weight(f"{_DECODER}pre_cross_attn_layernorm", "copy", f"{_THEIR_DECODER}1.layer_norm"),
        _weight(f"{_DECODER}cross_attention.linear_q", "copy", f"{_CROSS}q"),
        _weight(f"{_DECODER}cross_attention.linear_kv", "kv", f"{_CROSS}k", f"{_CROSS}v"),
        _weight(f"{_DECODER}cross_attention.linear_proj", "copy", f"{_CROSS}o"),
        _weight(f"{STAGE}encoder.final_layernorm", "copy", "encoder.final_layer_norm"),
        _weight(f"{STAGE}decoder.final_layernorm", "copy", "decoder.final_layer_norm"),
        _weight(OUTPUT, "copy", "lm_head"),
    ),
    # Copies of the word table (see below), and a table that old files have although their model does not read it.
    (
        r"(encoder|decoder)\.embed_tokens\.weight",
        r"decoder\.block\.0\.layer\.1\.EncDecAttention\.relative_attention_bias\.weight",
    ),
    _WORDS,
    "T5Model",
    copies=tuple((f"{stack}.embed_tokens.weight", "shared.weight") for stack in ("encoder", "decoder")),
    untied=_untied,
)
