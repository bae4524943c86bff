"""Families with Llama's names: RMSNorm, rotary positions, a gated MLP, no biases, and what each of them does otherwise."""

from math import sqrt
from typing import Any

from megatron.convert.families.config_fields import (
    Field,
    Given,
    always,
    count,
    heads,
    number,
    only,
    share,
    switch,
    unused,
)
from megatron.convert.families.family import (
    ABOUT,
    LAYER,
    NO_WORDS,
    NOT_ENCODERS,
    OUTPUT,
    STAGE,
    WORD_TABLE,
    Family,
    Head,
    Row,
    activation,
    bias,
    both,
    multiplier,
)
from megatron.convert.families.rope import rope
from megatron.convert.families.sliding_window import all_but_each, windows

_THEIRS = "model.layers.{i}."
_BASE = {"normalization": "RMSNorm", "add_bias_linear": False, "hidden_dropout": 0.0, "position_embedding_type": "rope"}
_IGNORED = (r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq", r"model\.rotary_emb\.inv_freq")


def _attention(norms: str = "copy") -> tuple[Row, ...]:
    return (
        *both(f"{LAYER}self_attention.linear_qkv", "qkv", *(f"{_THEIRS}self_attn.{x}_proj" for x in "qkv")),
        *both(f"{LAYER}self_attention.linear_proj", "copy", f"{_THEIRS}self_attn.o_proj"),
        *both(f"{LAYER}self_attention.q_layernorm", norms, f"{_THEIRS}self_attn.q_norm"),
        *both(f"{LAYER}self_attention.k_layernorm", norms, f"{_THEIRS}self_attn.k_norm"),
    )


def _norms(**names: str) -> tuple[Row, ...]:
    return tuple(row for ours, theirs in names.items() for row in both(f"{LAYER}{ours}", "copy", f"{_THEIRS}{theirs}"))


ENDS = (
    Row(WORD_TABLE, "copy", ("model.embed_tokens.weight",)),
    *both(f"{STAGE}decoder.final_layernorm", "copy", "model.norm"),
    *both(OUTPUT, "copy", "lm_head"),
)
_GATED = (
    *both(f"{LAYER}mlp.linear_fc1", "gate_up", f"{_THEIRS}mlp.gate_proj", f"{_THEIRS}mlp.up_proj"),
    *both(f"{LAYER}mlp.linear_fc2", "copy", f"{_THEIRS}mlp.down_proj"),
)
_BEFORE = _norms(input_layernorm="input_layernorm", pre_mlp_layernorm="post_attention_layernorm")
_AFTER = _norms(post_self_attn_layernorm="post_attention_layernorm", post_mlp_layernorm="post_feedforward_layernorm")
_SANDWICH = _AFTER + _norms(input_layernorm="input_layernorm", pre_mlp_layernorm="pre_feedforward_layernorm")
LLAMA_ROWS = (*ENDS, *_BEFORE, *_attention(), *_GATED)


def _fields(
    *own: Field,
    length: int,
    tied: bool = False,
    epsilon: float = 1e-6,
    width: int | None = None,
    groups: int | None = None,
) -> tuple:
    """length, tied, epsilon, width, groups: the class's own max_position_embeddings, tied head, epsilon, width of a head and
    key/value heads."""
    named = {key for field in own for key in field.keys}
    usual = (
        count("hidden_size", "hidden_size"),
        count("num_hidden_layers", "num_layers"),
        count("intermediate_size", "ffn_hidden_size", said_by="ffn_size"),
        count("max_position_embeddings", "max_position_embeddings", length),
        heads("num_attention_heads", "num_key_value_heads", "head_dim", width, groups),
        number("rms_norm_eps", "norm_epsilon", epsilon),
        activation("hidden_act", "silu", gated=True),
        switch("tie_word_embeddings", "untie_embeddings_and_output_weights", tied, opposite=True),
        share("attention_dropout", "attention_dropout"),
        *NOT_ENCODERS,
    )
    return (*(field for field in usual if not named & {*field.keys}), *own, ABOUT)


_BIASES = (bias("attention_bias", "add_qkv_bias", "add_attention_output_bias"), bias("mlp_bias", "add_mlp_bias"))
# Keys of published files that transformers does not read. They say what it computes, and no other value is read.
_OF_SMOLLM = (only("rope_interleaved", False), unused("is_llama_config"))
_OF_PHI_4 = (
    *(only(name, False) for name in ("attention_bias", "mlp_bias", "lm_head_bias")),
    *(only(name, 1) for name in ("full_attn_mod", "interpolate_factor")),
)
_OF_COMMAND_R7B = (
    *(only(name, True) for name in ("use_embedding_sharing", "use_gated_activation", "use_parallel_block")),
    *(only("order_of_interleaved_layers", "local_attn_first"), only("position_embedding_type", "rope_gptj")),
    *(only("layer_switch", 4), always("rotary_pct", 1.0, 1)._replace(write=lambda model: {})),
    unused("use_parallel_embedding", "cache_implementation"),
)

LLAMA = Family("LlamaForCausalLM", _BASE, _fields(rope(), *_BIASES, *_OF_SMOLLM, length=2048), LLAMA_ROWS, _IGNORED)
MISTRAL = Family(
    "MistralForCausalLM",
    _BASE,
    _fields(rope(), windows(4096, lists=False), length=131072, groups=8),
    LLAMA_ROWS,
    _IGNORED,
)


def _from_layer(given: Given, layer: int) -> bool:
    return layer >= given.number("max_window_layers", 28)


def _first_with(layers: list[bool]) -> dict[str, Any]:
    return {"max_window_layers": layers.index(True) if True in layers else len(layers)}


_QWEN = windows(4096, _from_layer, keys=("max_window_layers",), switch="use_sliding_window", written=_first_with)
QWEN2 = Family(
    "Qwen2ForCausalLM",
    _BASE | {"add_qkv_bias": True},
    _fields(rope(), _QWEN, unused("use_mrope"), length=32768, groups=32),
    LLAMA_ROWS,
    _IGNORED,
)
QWEN3 = Family(
    "Qwen3ForCausalLM",
    _BASE | {"qk_layernorm": True},
    _fields(rope(), _QWEN, _BIASES[0], length=32768, width=128, groups=32),
    LLAMA_ROWS,
    _IGNORED,
)

# ---------------------------------------------------------------- Gemma

_GEMMA = _BASE | {"apply_layernorm_1p": True}


def _embedding_times_root() -> Field:
    """Embeddings are multiplied by the square root of the width."""
    return Field((), lambda given: {"embedding_multiplier": sqrt(given.count("hidden_size"))}, lambda model: {})


_TANH = ("gelu_pytorch_tanh", "gelu_new", "gelu_fast")


def _gemma_activation(key: str, other: str) -> Field:
    """key: what the class reads; other: the one of hidden_act and hidden_activation that it passes over.

    gelu is refused where it is hidden_act: it has meant the tanh form to transformers for a time, and the exact one since.
    """
    said = activation(key, _TANH[0], gated=True)

    def read(given: Given) -> dict[str, Any]:
        if key == "hidden_act" and given.get(key) == "gelu":
            raise given.wrong(
                key, f"write {_TANH[0]}, which Gemma was trained with; its versions read gelu in two ways"
            )
        passed_over = (*_TANH, "gelu") if other == "hidden_act" else ()
        given.choice(other, None, (None, given.get(key, _TANH[0]), *passed_over))
        return said.read(given)

    return Field((key, other), read, lambda model: said.write(model) | {other: said.write(model)[key]})


def _score_scale(key: str) -> Field:
    """The scores' scale as the width of a head that would have it."""

    def read(given: Given) -> dict[str, Any]:
        if not (width := given.number(key, 256)) > 0:
            raise given.wrong(key, "it must be positive")
        return {"softmax_scale": width**-0.5}

    return Field(
        (key,), read, lambda model: {key: _whole(model.softmax_scale**-2 if model.softmax_scale else model.head_width)}
    )


def _whole(x: float) -> float | int:
    return round(x) if abs(x - round(x)) < 1e-9 * x else x


def _cap(key: str, ours: str, default: float | None) -> Field:
    def read(given: Given) -> dict[str, Any]:
        value = given.number(key, None if key in given.values else default)
        return {} if value is None else {ours: value}

    return Field((key,), read, lambda model: {key: getattr(model, ours)})


_GEMMA_FIELDS = (_embedding_times_root(), _BIASES[0], always("use_bidirectional_attention", False, None))
_GEMMA_SIZES = {"length": 8192, "tied": True, "width": 256}
GEMMA = Family(
    "GemmaForCausalLM",
    _GEMMA,
    _fields(rope(), _gemma_activation("hidden_act", "hidden_activation"), *_GEMMA_FIELDS, **_GEMMA_SIZES, groups=16),
    LLAMA_ROWS,
    _IGNORED,
)
_GEMMA_ROWS = (*ENDS, *_SANDWICH, *_attention(), *_GATED)
GEMMA2 = Family(
    "Gemma2ForCausalLM",
    _GEMMA | {"norm_placement": "sandwich"},
    _fields(
        rope(),
        _gemma_activation("hidden_activation", "hidden_act"),
        *_GEMMA_FIELDS,
        _score_scale("query_pre_attn_scalar"),
        _cap("attn_logit_softcapping", "attn_logit_softcapping", 50.0),
        _cap("final_logit_softcapping", "final_logit_softcapping", 30.0),
        windows(4096, lambda given, layer: layer % 2 == 0),
        unused("cache_implementation"),
        **_GEMMA_SIZES,
        groups=4,
    ),
    _GEMMA_ROWS,
    _IGNORED,
)
GEMMA3 = Family(
    "Gemma3ForCausalLM",
    _GEMMA | {"norm_placement": "sandwich", "qk_layernorm": True},
    _fields(
        rope(1e6, of_windows=("rope_local_base_freq", 1e4)),
        _gemma_activation("hidden_activation", "hidden_act"),
        *_GEMMA_FIELDS,
        _score_scale("query_pre_attn_scalar"),
        _cap("final_logit_softcapping", "final_logit_softcapping", None),
        windows(
            4096, all_but_each("sliding_window_pattern", 6), keys=("sliding_window_pattern", "_sliding_window_pattern")
        ),
        unused("attn_logit_softcapping", "cache_implementation"),  # in the config, and not used by its attention
        **_GEMMA_SIZES | {"length": 131072, "groups": 4},
    ),
    _GEMMA_ROWS,
    _IGNORED,
    heads=(Head((f"{OUTPUT}.",), ("TextModel", *NO_WORDS[1:])),),
)

# ---------------------------------------------------------------- Phi-3, OLMo 2 and 3, SmolLM 3, Granite, Cohere

PHI3 = Family(
    "Phi3ForCausalLM",
    _BASE,
    _fields(rope(partial=1.0, only_longrope=4096), windows(None, lists=False), *_OF_PHI_4, length=4096, epsilon=1e-5),
    (
        *ENDS,
        *_BEFORE,
        *both(f"{LAYER}self_attention.linear_qkv", "qkv_rows", f"{_THEIRS}self_attn.qkv_proj"),
        *both(f"{LAYER}self_attention.linear_proj", "copy", f"{_THEIRS}self_attn.o_proj"),
        *both(f"{LAYER}mlp.linear_fc1", "copy", f"{_THEIRS}mlp.gate_up_proj"),
        *both(f"{LAYER}mlp.linear_fc2", "copy", f"{_THEIRS}mlp.down_proj"),
    ),
    _IGNORED,
)
_OLMO = _BASE | {"norm_placement": "branch", "qk_layernorm": True, "qk_norm_over": "width"}
_OLMO_ROWS = (*ENDS, *_AFTER, *_attention(), *_GATED)
_NO_WIDTH = heads("num_attention_heads", "num_key_value_heads", None)
_OLMO_SIZES = {"length": 2048, "epsilon": 1e-5}
OLMO2 = Family(
    "Olmo2ForCausalLM",
    _OLMO,
    _fields(rope(type_key="type"), _NO_WIDTH, _BIASES[0], **_OLMO_SIZES),
    _OLMO_ROWS,
    _IGNORED,
)
OLMO3 = Family(
    "Olmo3ForCausalLM",
    _OLMO,
    _fields(
        rope(None, of_windows=("", None)),
        _NO_WIDTH,
        _BIASES[0],
        windows(4096, lambda given, layer: (layer + 1) % 4 != 0),
        **_OLMO_SIZES,
    ),
    _OLMO_ROWS,
    _IGNORED,
)


def _rotates() -> Field:
    """no_rope_layers: 1 for a layer that rotates, 0 for one that does not."""
    key, every = "no_rope_layers", "no_rope_layer_interval"

    def read(given: Given) -> dict[str, Any]:
        layers, interval = given.count("num_hidden_layers"), given.count(every, 4)
        rotates = given.get(key, [int((layer + 1) % interval != 0) for layer in range(layers)])
        if not isinstance(rotates, list) or len(rotates) != layers or not {*map(repr, rotates)} <= {"0", "1"}:
            raise given.wrong(key, f"it must have a 1 or a 0 for each of {layers} layers")
        return {} if all(rotates) else {"no_rope_freq": str([1 - one for one in rotates]).replace(" ", "")}

    rotating = lambda model: {key: [int(model.rope_of(i) is not None) for i in range(model.num_layers)]}  # noqa: E731
    return Field((key, every), read, rotating)


def _listed_alone(given: Given, layer: int) -> bool:
    raise given.wrong("use_sliding_window", "layer_types must say which layers have a window")


SMOLLM3 = Family(
    "SmolLM3ForCausalLM",
    _BASE,
    _fields(
        rope(2e6),
        _rotates(),
        windows(None, _listed_alone, switch="use_sliding_window"),
        unused("max_window_layers"),
        heads("num_attention_heads", "num_key_value_heads", None, default_groups=4),
        *_BIASES,
        length=32768,
        tied=True,
    ),
    LLAMA_ROWS,
    _IGNORED,
)


GRANITE = Family(
    "GraniteForCausalLM",
    _BASE,
    _fields(
        rope(),
        _NO_WIDTH,
        *_BIASES,
        multiplier("embedding_multiplier", "embedding_multiplier", 1.0),
        multiplier("attention_multiplier", "softmax_scale", 1.0),
        multiplier("residual_multiplier", "residual_multiplier", 1.0),
        multiplier("logits_scaling", "logit_multiplier", 1.0, inverse=True),
        length=2048,
    ),
    LLAMA_ROWS,
    _IGNORED,
)


def _each_head() -> Field:
    def read(given: Given) -> dict[str, Any]:
        has = given.choice("use_qk_norm", False, (False, True))
        return {"qk_layernorm": True, "qk_norm_over": "each-head"} if has else {}

    return Field(("use_qk_norm",), read, lambda model: {"use_qk_norm": model.qk_layernorm})


_COHERE = _BASE | {"normalization": "LayerNorm", "norm_bias": False, "norm_placement": "parallel-one-norm"}
_COHERE_ROWS = (*ENDS, *_norms(input_layernorm="input_layernorm"), *_attention("flat"), *_GATED)
_COHERE_FIELDS = (
    number("layer_norm_eps", "norm_epsilon", 1e-5),
    unused("rms_norm_eps", "model_max_length"),
    multiplier("logit_scale", "logit_multiplier", 0.0625),
    bias("attention_bias", "add_qkv_bias", "add_attention_output_bias"),
)
COHERE = Family(
    "CohereForCausalLM",
    _COHERE,
    _fields(rope(None, interleaved=True), _NO_WIDTH, _each_head(), *_COHERE_FIELDS, length=8192, tied=True),
    _COHERE_ROWS,
    _IGNORED,
)
COHERE2 = Family(
    "Cohere2ForCausalLM",
    _COHERE,
    _fields(
        rope(interleaved=True),
        *_COHERE_FIELDS,
        *_OF_COMMAND_R7B,
        windows(
            4096,
            all_but_each("sliding_window_pattern", 4),
            keys=("sliding_window_pattern", "_sliding_window_pattern"),
            rotates_with=True,
        ),
        length=8192,
        tied=True,
    ),
    _COHERE_ROWS,
    _IGNORED,
)
