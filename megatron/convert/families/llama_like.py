"""Tables of the families with Llama's names, and how each of them differs.

They have RMSNorm, rotary positions, a gated MLP and no biases.
"""

from math import sqrt
from typing import Any

from megatron.convert.families.config_fields import (
    ConfigReader,
    Field,
    boolean,
    count,
    dropout_rate,
    fixed,
    fixed_not_written,
    heads,
    ignored_keys,
    number,
)
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
    bias,
    multiplier,
    weight_and_bias,
)
from megatron.convert.families.rope import rope
from megatron.convert.families.sliding_window import all_but_each, windows

HF_LAYER = "model.layers.{i}."
LLAMA_SETTINGS = {
    "normalization": "RMSNorm",
    "add_bias_linear": False,
    "hidden_dropout": 0.0,
    "position_embedding_type": "rope",
}
IGNORED_TENSORS = (r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq", r"model\.rotary_emb\.inv_freq")


def attention_mappings(qk_norm_operation: str = "copy") -> tuple[ParamMapping, ...]:
    return (
        *weight_and_bias(f"{LAYER}self_attention.linear_qkv", "qkv", *(f"{HF_LAYER}self_attn.{x}_proj" for x in "qkv")),
        *weight_and_bias(f"{LAYER}self_attention.linear_proj", "copy", f"{HF_LAYER}self_attn.o_proj"),
        *weight_and_bias(f"{LAYER}self_attention.q_layernorm", qk_norm_operation, f"{HF_LAYER}self_attn.q_norm"),
        *weight_and_bias(f"{LAYER}self_attention.k_layernorm", qk_norm_operation, f"{HF_LAYER}self_attn.k_norm"),
    )


def _norms(**names: str) -> tuple[ParamMapping, ...]:
    """names: our norm of a layer = its Hugging Face name."""
    mappings = []
    for ours, hf_name in names.items():
        mappings += weight_and_bias(f"{LAYER}{ours}", "copy", f"{HF_LAYER}{hf_name}")
    return tuple(mappings)


EMBEDDING_NORM_AND_HEAD = (
    ParamMapping(WORD_EMBEDDINGS, "copy", ("model.embed_tokens.weight",)),
    *weight_and_bias(f"{LANGUAGE_MODEL}decoder.final_layernorm", "copy", "model.norm"),
    *weight_and_bias(OUTPUT_LAYER, "copy", "lm_head"),
)
GATED_MLP = (
    *weight_and_bias(f"{LAYER}mlp.linear_fc1", "gate_up", f"{HF_LAYER}mlp.gate_proj", f"{HF_LAYER}mlp.up_proj"),
    *weight_and_bias(f"{LAYER}mlp.linear_fc2", "copy", f"{HF_LAYER}mlp.down_proj"),
)
PRE_NORMS = _norms(input_layernorm="input_layernorm", pre_mlp_layernorm="post_attention_layernorm")
POST_NORMS = _norms(
    post_self_attn_layernorm="post_attention_layernorm", post_mlp_layernorm="post_feedforward_layernorm"
)
_SANDWICH_NORMS = POST_NORMS + _norms(input_layernorm="input_layernorm", pre_mlp_layernorm="pre_feedforward_layernorm")
LLAMA_MAPPINGS = (*EMBEDDING_NORM_AND_HEAD, *PRE_NORMS, *attention_mappings(), *GATED_MLP)


def llama_fields(
    *own: Field,
    length: int,
    tied: bool = False,
    epsilon: float = 1e-6,
    width: int | None = None,
    groups: int | None = None,
) -> tuple[Field, ...]:
    """Return the fields of a family: those that all share, but for the keys that `own`, the family's own fields, have.

    The class's own values, for a config.json without the key: length: max_position_embeddings; tied:
    tie_word_embeddings; epsilon: rms_norm_eps; width: of a head; groups: key/value heads.
    """
    own_keys = {key for field in own for key in field.keys}
    shared = (
        count("hidden_size", "hidden_size"),
        count("num_hidden_layers", "num_layers"),
        count("intermediate_size", "ffn_hidden_size", value_from="ffn_size"),
        count("max_position_embeddings", "max_position_embeddings", length),
        heads("num_attention_heads", "num_key_value_heads", "head_dim", width, groups),
        number("rms_norm_eps", "norm_epsilon", epsilon),
        activation("hidden_act", "silu", gated=True),
        boolean("tie_word_embeddings", "untie_embeddings_and_output_weights", tied, opposite=True),
        dropout_rate("attention_dropout", "attention_dropout"),
        *NOT_ENCODER_DECODER,
    )
    shared = tuple(field for field in shared if not own_keys & {*field.keys})
    return (*shared, *own, UNUSED_KEYS)


ATTENTION_BIAS = bias("attention_bias", "add_qkv_bias", "add_attention_output_bias")
_BIASES = (ATTENTION_BIAS, bias("mlp_bias", "add_mlp_bias"))
# Keys of published files that transformers does not read: they state what its code does, and no other value is accepted.
_KEYS_OF_SMOLLM = (fixed_not_written("rope_interleaved", False), ignored_keys("is_llama_config"))
_KEYS_OF_PHI_4 = (
    *(fixed_not_written(name, False) for name in ("attention_bias", "mlp_bias", "lm_head_bias")),
    *(fixed_not_written(name, 1) for name in ("full_attn_mod", "interpolate_factor")),
)
_KEYS_OF_COMMAND_R7B = (
    *(
        fixed_not_written(name, True)
        for name in ("use_embedding_sharing", "use_gated_activation", "use_parallel_block")
    ),
    fixed_not_written("order_of_interleaved_layers", "local_attn_first"),
    fixed_not_written("position_embedding_type", "rope_gptj"),
    fixed_not_written("layer_switch", 4),
    fixed("rotary_pct", 1.0, 1)._replace(write=lambda model: {}),
    ignored_keys("use_parallel_embedding"),
)

LLAMA = Family(
    "LlamaForCausalLM",
    LLAMA_SETTINGS,
    llama_fields(rope(), *_BIASES, *_KEYS_OF_SMOLLM, length=2048),
    LLAMA_MAPPINGS,
    IGNORED_TENSORS,
)
MISTRAL = Family(
    "MistralForCausalLM",
    LLAMA_SETTINGS,
    llama_fields(rope(), windows(4096, lists=False), length=131072, groups=8),
    LLAMA_MAPPINGS,
    IGNORED_TENSORS,
)


def _from_max_window_layers(reader: ConfigReader, layer: int) -> bool:
    return layer >= reader.number("max_window_layers", 28)


def _max_window_layers(layers: list[bool]) -> dict[str, Any]:
    return {"max_window_layers": layers.index(True) if True in layers else len(layers)}


_QWEN = windows(
    4096, _from_max_window_layers, keys=("max_window_layers",), switch="use_sliding_window", written=_max_window_layers
)
QWEN2 = Family(
    "Qwen2ForCausalLM",
    LLAMA_SETTINGS | {"add_qkv_bias": True},
    llama_fields(rope(), _QWEN, ignored_keys("use_mrope"), length=32768, groups=32),
    LLAMA_MAPPINGS,
    IGNORED_TENSORS,
)
QWEN3 = Family(
    "Qwen3ForCausalLM",
    LLAMA_SETTINGS | {"qk_layernorm": True},
    llama_fields(rope(), _QWEN, ATTENTION_BIAS, length=32768, width=128, groups=32),
    LLAMA_MAPPINGS,
    IGNORED_TENSORS,
)

# ---------------------------------------------------------------- Gemma

_GEMMA = LLAMA_SETTINGS | {"apply_layernorm_1p": True}


def _embedding_multiplier() -> Field:
    """Embeddings are multiplied by the square root of the hidden size; no key says so."""

    def read(reader: ConfigReader) -> dict[str, Any]:
        return {"embedding_multiplier": sqrt(reader.count("hidden_size"))}

    return Field((), read, lambda model: {})


_TANH = ("gelu_pytorch_tanh", "gelu_new", "gelu_fast")


def _gemma_activation(key: str, other: str) -> Field:
    """The activation under two keys. key: the one that the class reads; other: the one that it ignores.

    gelu as hidden_act is refused: transformers computed the tanh form for it for a time, and has computed the
    exact one since.
    """
    field = activation(key, _TANH[0], gated=True)

    def read(reader: ConfigReader) -> dict[str, Any]:
        if key == "hidden_act" and reader.get(key) == "gelu":
            raise reader.error(
                key, f"write {_TANH[0]}, which Gemma was trained with; its versions read gelu in two ways"
            )
        # The ignored key may repeat the value; published files of Gemma 2 and 3 also have another GELU as hidden_act.
        ignored_values = (*_TANH, "gelu") if other == "hidden_act" else ()
        reader.choice(other, None, (None, reader.get(key, _TANH[0]), *ignored_values))
        return field.read(reader)

    def write(model: Any) -> dict[str, Any]:
        name = field.write(model)[key]
        return {key: name, other: name}

    return Field((key, other), read, write)


def _attention_scale(key: str) -> Field:
    """The scale of attention scores, given as the width of a head that would have it: scale = width ** -0.5."""

    def read(reader: ConfigReader) -> dict[str, Any]:
        width = reader.number(key, 256)
        if not width > 0:
            raise reader.error(key, "it must be positive")
        return {"softmax_scale": width**-0.5}

    def write(model: Any) -> dict[str, Any]:
        width = model.softmax_scale**-2 if model.softmax_scale else model.head_width
        is_integer = abs(width - round(width)) < 1e-9 * width  # but for rounding
        return {key: round(width) if is_integer else width}

    return Field((key,), read, write)


def _softcap(key: str, setting: str, default: float | None) -> Field:
    """The cap of scores or logits. null: none; default: the class's own, where the key is absent."""

    def read(reader: ConfigReader) -> dict[str, Any]:
        value = reader.number(key, None if key in reader.values else default)
        return {} if value is None else {setting: value}

    return Field((key,), read, lambda model: {key: getattr(model, setting)})


_GEMMA_FIELDS = (_embedding_multiplier(), ATTENTION_BIAS, fixed("use_bidirectional_attention", False, None))
_GEMMA_SIZES = {"length": 8192, "tied": True, "width": 256}
GEMMA = Family(
    "GemmaForCausalLM",
    _GEMMA,
    llama_fields(
        rope(), _gemma_activation("hidden_act", "hidden_activation"), *_GEMMA_FIELDS, **_GEMMA_SIZES, groups=16
    ),
    LLAMA_MAPPINGS,
    IGNORED_TENSORS,
)
_GEMMA_MAPPINGS = (*EMBEDDING_NORM_AND_HEAD, *_SANDWICH_NORMS, *attention_mappings(), *GATED_MLP)
GEMMA2 = Family(
    "Gemma2ForCausalLM",
    _GEMMA | {"norm_placement": "sandwich"},
    llama_fields(
        rope(),
        _gemma_activation("hidden_activation", "hidden_act"),
        *_GEMMA_FIELDS,
        _attention_scale("query_pre_attn_scalar"),
        _softcap("attn_logit_softcapping", "attn_logit_softcapping", 50.0),
        _softcap("final_logit_softcapping", "final_logit_softcapping", 30.0),
        windows(4096, lambda reader, layer: layer % 2 == 0),
        **_GEMMA_SIZES,
        groups=4,
    ),
    _GEMMA_MAPPINGS,
    IGNORED_TENSORS,
)
GEMMA3 = Family(
    "Gemma3ForCausalLM",
    _GEMMA | {"norm_placement": "sandwich", "qk_layernorm": True},
    llama_fields(
        rope(1e6, local_base=("rope_local_base_freq", 1e4)),
        _gemma_activation("hidden_activation", "hidden_act"),
        *_GEMMA_FIELDS,
        _attention_scale("query_pre_attn_scalar"),
        _softcap("final_logit_softcapping", "final_logit_softcapping", None),
        windows(
            4096, all_but_each("sliding_window_pattern", 6), keys=("sliding_window_pattern", "_sliding_window_pattern")
        ),
        ignored_keys("attn_logit_softcapping"),  # in the config, and not used by its attention
        **_GEMMA_SIZES | {"length": 131072, "groups": 4},
    ),
    _GEMMA_MAPPINGS,
    IGNORED_TENSORS,
    heads=(Head((f"{OUTPUT_LAYER}.",), ("TextModel", *NO_LM_HEAD[1:])),),
)

# ---------------------------------------------------------------- Phi-3, OLMo 2 and 3, SmolLM 3, Granite, Cohere

PHI3 = Family(
    "Phi3ForCausalLM",
    LLAMA_SETTINGS,
    llama_fields(
        rope(partial=1.0, only_longrope=4096), windows(None, lists=False), *_KEYS_OF_PHI_4, length=4096, epsilon=1e-5
    ),
    (
        *EMBEDDING_NORM_AND_HEAD,
        *PRE_NORMS,
        *weight_and_bias(f"{LAYER}self_attention.linear_qkv", "qkv_rows", f"{HF_LAYER}self_attn.qkv_proj"),
        *weight_and_bias(f"{LAYER}self_attention.linear_proj", "copy", f"{HF_LAYER}self_attn.o_proj"),
        *weight_and_bias(f"{LAYER}mlp.linear_fc1", "copy", f"{HF_LAYER}mlp.gate_up_proj"),
        *weight_and_bias(f"{LAYER}mlp.linear_fc2", "copy", f"{HF_LAYER}mlp.down_proj"),
    ),
    IGNORED_TENSORS,
)
OLMO_SETTINGS = LLAMA_SETTINGS | {"norm_placement": "branch", "qk_layernorm": True, "qk_norm_over": "width"}
_OLMO_MAPPINGS = (*EMBEDDING_NORM_AND_HEAD, *POST_NORMS, *attention_mappings(), *GATED_MLP)
HEADS_WITHOUT_WIDTH = heads("num_attention_heads", "num_key_value_heads", None)
_OLMO_SIZES = {"length": 2048, "epsilon": 1e-5}
OLMO2 = Family(
    "Olmo2ForCausalLM",
    OLMO_SETTINGS,
    llama_fields(rope(type_key="type"), HEADS_WITHOUT_WIDTH, ATTENTION_BIAS, **_OLMO_SIZES),
    _OLMO_MAPPINGS,
    IGNORED_TENSORS,
)
OLMO3 = Family(
    "Olmo3ForCausalLM",
    OLMO_SETTINGS,
    llama_fields(
        rope(None, local_base=("", None)),
        HEADS_WITHOUT_WIDTH,
        ATTENTION_BIAS,
        windows(4096, lambda reader, layer: (layer + 1) % 4 != 0),
        **_OLMO_SIZES,
    ),
    _OLMO_MAPPINGS,
    IGNORED_TENSORS,
)


def _rotary_layers() -> Field:
    """The layers with rotary positions. no_rope_layers: 1 for a layer that has them, 0 for one that does not."""
    key = "no_rope_layers"
    interval_key = "no_rope_layer_interval"

    def read(reader: ConfigReader) -> dict[str, Any]:
        layers = reader.count("num_hidden_layers")
        interval = reader.count(interval_key, 4)
        rotates = reader.get(key, [int((layer + 1) % interval != 0) for layer in range(layers)])
        if not isinstance(rotates, list) or len(rotates) != layers or not {*map(repr, rotates)} <= {"0", "1"}:
            raise reader.error(key, f"it must have a 1 or a 0 for each of {layers} layers")
        if all(rotates):
            return {}
        return {"no_rope_freq": str([1 - flag for flag in rotates]).replace(" ", "")}

    def write(model: Any) -> dict[str, Any]:
        return {key: [int(model.rope_of(i) is not None) for i in range(model.num_layers)]}

    return Field((key, interval_key), read, write)


def only_listed(reader: ConfigReader, layer: int) -> bool:
    """Refuse a window without a list of layers: the class has no rule for it."""
    raise reader.error("use_sliding_window", "layer_types must say which layers have a window")


SMOLLM3 = Family(
    "SmolLM3ForCausalLM",
    LLAMA_SETTINGS,
    llama_fields(
        rope(2e6),
        _rotary_layers(),
        windows(None, only_listed, switch="use_sliding_window"),
        ignored_keys("max_window_layers"),
        heads("num_attention_heads", "num_key_value_heads", None, default_groups=4),
        *_BIASES,
        length=32768,
        tied=True,
    ),
    LLAMA_MAPPINGS,
    IGNORED_TENSORS,
)


GRANITE_MULTIPLIERS = (
    multiplier("embedding_multiplier", "embedding_multiplier", 1.0),
    multiplier("attention_multiplier", "softmax_scale", 1.0),
    multiplier("residual_multiplier", "residual_multiplier", 1.0),
    multiplier("logits_scaling", "logit_multiplier", 1.0, inverse=True),
)
GRANITE = Family(
    "GraniteForCausalLM",
    LLAMA_SETTINGS,
    llama_fields(rope(), HEADS_WITHOUT_WIDTH, *_BIASES, *GRANITE_MULTIPLIERS, length=2048),
    LLAMA_MAPPINGS,
    IGNORED_TENSORS,
)


def _qk_norm_of_each_head() -> Field:
    """Norms of queries and keys with weights of their own for each head."""

    def read(reader: ConfigReader) -> dict[str, Any]:
        if not reader.choice("use_qk_norm", False, (False, True)):
            return {}
        return {"qk_layernorm": True, "qk_norm_over": "each-head"}

    return Field(("use_qk_norm",), read, lambda model: {"use_qk_norm": model.qk_layernorm})


_COHERE = LLAMA_SETTINGS | {"normalization": "LayerNorm", "norm_bias": False, "norm_placement": "parallel-one-norm"}
_COHERE_MAPPINGS = (
    *EMBEDDING_NORM_AND_HEAD,
    *_norms(input_layernorm="input_layernorm"),
    *attention_mappings("flat"),
    *GATED_MLP,
)
_COHERE_FIELDS = (
    number("layer_norm_eps", "norm_epsilon", 1e-5),
    ignored_keys("rms_norm_eps", "model_max_length"),
    multiplier("logit_scale", "logit_multiplier", 0.0625),
    bias("attention_bias", "add_qkv_bias", "add_attention_output_bias"),
)
COHERE = Family(
    "CohereForCausalLM",
    _COHERE,
    llama_fields(
        rope(None, interleaved=True),
        HEADS_WITHOUT_WIDTH,
        _qk_norm_of_each_head(),
        *_COHERE_FIELDS,
        length=8192,
        tied=True,
    ),
    _COHERE_MAPPINGS,
    IGNORED_TENSORS,
)
COHERE2 = Family(
    "Cohere2ForCausalLM",
    _COHERE,
    llama_fields(
        rope(interleaved=True),
        *_COHERE_FIELDS,
        *_KEYS_OF_COMMAND_R7B,
        windows(
            4096,
            all_but_each("sliding_window_pattern", 4),
            keys=("sliding_window_pattern", "_sliding_window_pattern"),
            rotates_with=True,
        ),
        length=8192,
        tied=True,
    ),
    _COHERE_MAPPINGS,
    IGNORED_TENSORS,
)
