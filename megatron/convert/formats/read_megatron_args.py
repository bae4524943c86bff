"""The `args` of a checkpoint of Megatron-LM as settings of ours. No torch.

Its namespace holds every flag of the run, hundreds that say nothing of the model. So what is read is a list; what would
change
the model and is not built is another, which is refused unless it is off; what says nothing of it is a third
(megatron_ignored_args.py).
The reader is told of all others that are on.
"""

from collections.abc import Mapping
from typing import Any

from megatron.convert.families.config_fields import Given, ModelSettings
from megatron.convert.formats.megatron_ignored_args import unclear_args
from megatron.convert.formats.pickle_as_data import Made, Named
from megatron.core.base.dataclass_flags import ConfigError

# What would change what the model computes, and is not read.
_MUST_BE_OFF = (
    *("num_experts", "multi_latent_attention", "mtp_num_layers", "heterogeneous_layers_config_path", "qk_l2_norm"),
    *("heterogeneous_layers_config_encoded_json", "hybrid_override_pattern", "hybrid_layer_pattern", "is_hybrid_model"),
    *("attention_output_gate", "linear_attention_freq", "linear_attention_type", "experimental_attention_variant"),
    *("use_mup", "retro_add_retriever", "retro_project_dir", "geglu", "glu_activation", "parallel_attn"),
    *("embed_layernorm", "alibi", "sliding_window_size", "enable_mhc_connections", "num_moe_experts"),
)
# What is read where another argument asks for it, and means nothing elsewhere.
_READ_IF_ASKED = (
    *("rotary_base", "rotary_percent", "rotary_interleaved", "rotary_seq_len_interpolation_factor", "rope_type"),
    *("use_rope_scaling", "rope_scaling_factor", "no_rope_freq", "num_query_groups", "window_attn_skip_freq"),
    *("num_layers", "encoder_num_layers", "norm_epsilon", "layernorm_epsilon", "bias_gelu_fusion"),
    *("add_position_embedding", "disable_bias_linear"),
)
_BOOLS = (False, True)
_MOST_LIST = 100_000


def plain_args(value: Any) -> dict[str, Any]:
    """A namespace as plain values: what is neither a number, a text nor a list of them becomes the name of its type."""
    if not isinstance(value, Made) or not value.is_a("argparse.Namespace", "types.SimpleNamespace"):
        return {}
    state = value.state if isinstance(value.state, dict) else {}
    return {name: _plain(one) for name, one in state.items() if isinstance(name, str)}


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, bool | int | float | Named):
        return str(value) if isinstance(value, Named) else value
    if isinstance(value, str):
        return value[:100_000]
    if isinstance(value, list | tuple) and len(value) <= _MOST_LIST:
        return [one if isinstance(one, bool | int | float) else f"<{type(one).__name__}>" for one in value]
    return f"<{type(value).__name__}>"


def unclear(args: Mapping[str, Any]) -> str:
    """What is said of arguments that may change the model and are not known here; "" if there are none."""
    given = Given(args, "args")
    _settings(given)
    return unclear_args(args, {*given.asked, *_READ_IF_ASKED, *_MUST_BE_OFF})


def settings_of_args(args: Mapping[str, Any], source: str) -> ModelSettings:
    """The settings of the model, by names of `ModelConfig`. Raises ConfigError: what is missing, unclear or not built."""
    on = [name for name in _MUST_BE_OFF if args.get(name) not in (None, False, 0, "", [])]
    if on:
        shown = ", ".join(f"{name} ({args[name]!r:.40})" for name in on)
        raise ConfigError(f"{source}: the model was trained with {shown}, which is not read")
    return _settings(Given(args, source))


def _settings(given: Given) -> ModelSettings:
    return _shape(given) | _block(given) | _attention(given) | _positions(given) | _training(given)


def _first(given: Given, *names: str) -> str:
    """The one of several names of a flag that there is."""
    return next((name for name in names if given.values.get(name) is not None), names[0])


def _shape(given: Given) -> ModelSettings:
    heads, grouped = given.count("num_attention_heads"), given.choice("group_query_attention", False, _BOOLS)
    groups = given.count("num_query_groups", 1) if grouped else heads
    hidden, width = given.count("hidden_size"), given.count("kv_channels", None)
    if heads % groups or (width is None and hidden % heads):
        raise given.wrong("num_attention_heads", f"it must divide hidden_size, and be a multiple of {groups} groups")
    return {
        "num_layers": given.count(_first(given, "num_layers", "encoder_num_layers")),
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "ffn_hidden_size": given.count("ffn_hidden_size", 4 * hidden),
        "kv_channels": width or hidden // heads,
        "group_query_attention": grouped,
        "num_query_groups": groups if grouped else 1,
        "max_position_embeddings": given.count("max_position_embeddings"),
        "untie_embeddings_and_output_weights": given.choice("untie_embeddings_and_output_weights", False, _BOOLS),
    }


def _block(given: Given) -> ModelSettings:
    epsilon = _first(given, "norm_epsilon", "layernorm_epsilon")
    # The second name is that of a few old checkpoints.
    biases = given.choice("add_bias_linear", not given.choice("disable_bias_linear", False, _BOOLS), _BOOLS)
    found: ModelSettings = {
        "normalization": given.choice("normalization", "LayerNorm", ("LayerNorm", "RMSNorm")),
        "norm_epsilon": given.number(epsilon, 1e-5),
        "apply_layernorm_1p": given.choice("apply_layernorm_1p", False, _BOOLS),
        "add_bias_linear": biases,
        "add_qkv_bias": given.choice("add_qkv_bias", False, _BOOLS),
    }
    if given.choice("apply_residual_connection_post_layernorm", False, _BOOLS):
        found["apply_residual_connection_post_layernorm"] = True
    if (bound := given.number("activation_func_clamp_value", None)) is not None:
        found["activation_func_clamp_value"] = bound
    if offset := given.number("glu_linear_offset", 0.0):
        found["glu_linear_offset"] = offset
    return found | _activation(given, biases)


def _activation(given: Given, biases: bool) -> ModelSettings:
    kinds = ("swiglu", "quick_geglu", "squared_relu", "openai_gelu", "onnx_safe")
    on = [name for name in kinds if given.choice(name, False, _BOOLS)]
    if len(on) > 1:
        raise ConfigError(f"{given.source}: {' and '.join(on)} are both on")
    # Its GELU is the tanh form where bias and activation are one kernel, and the exact one without.
    fused = given.choice("bias_gelu_fusion", True, _BOOLS) and biases
    return {
        "swiglu": {"swiglu": True},
        "quick_geglu": {"gated": True, "activation": "quick-gelu"},
        "squared_relu": {"activation": "squared-relu"},
        "openai_gelu": {"activation": "gelu-tanh"},
        "onnx_safe": {"activation": "gelu"},
        "": {"activation": "gelu-tanh" if fused else "gelu"},
    }[on[0] if on else ""]


def _attention(given: Given) -> ModelSettings:
    found: ModelSettings = {"qk_layernorm": given.choice("qk_layernorm", False, _BOOLS)}
    kind = given.choice("softmax_type", "vanilla", ("vanilla", "off-by-one", "learnable"))
    if kind != "vanilla":
        found["softmax_type"] = kind
    if (scale := given.number("softmax_scale", None)) is not None:
        found["softmax_scale"] = scale
    window = given.get("window_size")
    if window is not None and window != [-1, 0]:
        if not isinstance(window, list) or len(window) != 2 or window[1] != 0 or type(window[0]) is not int:
            raise given.wrong("window_size", "it must be two whole numbers, the second 0")
        found["window_size"] = f"{window[0]},0"
        if pattern := _pattern(given, "window_attn_skip_freq"):
            found["window_attn_skip_freq"] = pattern
    return found


def _pattern(given: Given, name: str) -> str | None:
    """A number N, or a list with 0 or 1 for each layer, as our flags write it."""
    value = given.get(name)
    if value is None or (type(value) is int and value >= 1):
        return None if value is None else str(value)
    if not isinstance(value, list) or not all(one in (0, 1) for one in value):
        raise given.wrong(name, "it must be a number, or a list of 0 and 1")
    return str([int(one) for one in value]).replace(" ", "")


def _positions(given: Given) -> ModelSettings:
    kind = given.choice("position_embedding_type", "learned_absolute", ("learned_absolute", "rope", "none"))
    if given.choice("use_rotary_position_embeddings", False, _BOOLS):  # before there was position_embedding_type
        kind = "rope"
    elif not given.choice("add_position_embedding", True, _BOOLS):
        kind = "none" if kind == "learned_absolute" else kind
    if kind != "rope":
        return {"position_embedding_type": kind}
    given.choice("rope_type", "rope", ("rope",))
    found: ModelSettings = {
        "position_embedding_type": kind,
        "rotary_base": given.number("rotary_base", 10000.0),
        "rotary_percent": given.number("rotary_percent", 1.0),
        "rotary_interleaved": given.choice("rotary_interleaved", False, _BOOLS),
    }
    if (factor := given.number("rotary_seq_len_interpolation_factor", None)) is not None:
        found["rotary_seq_len_interpolation_factor"] = factor
    if given.choice("use_rope_scaling", False, _BOOLS):
        found |= {"use_rope_scaling": True, "rope_scaling_factor": given.number("rope_scaling_factor", 8.0)}
    if pattern := _pattern(given, "no_rope_freq"):
        found["no_rope_freq"] = pattern
    return found


def _training(given: Given) -> ModelSettings:
    """What the run trained with, and another may change."""
    found: ModelSettings = {name: given.number(name, 0.1) for name in ("hidden_dropout", "attention_dropout")}
    half = {name: True for name in ("bf16", "fp16") if given.choice(name, False, _BOOLS)}
    if len(half) > 1:
        raise ConfigError(f"{given.source}: bf16 and fp16 are both on")
    return found | half | {"init_method_std": given.number("init_method_std", 0.02)}
