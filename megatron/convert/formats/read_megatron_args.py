"""Translate the `args` of a Megatron-LM checkpoint to settings of ours. No torch.

The namespace holds every flag of the run, and hundreds of them do not concern the model. So the arguments that are read
are listed; those that would change the model and are not supported are listed too, and refused unless they are off;
those that do not concern the model are in note_unknown_megatron_args.py. A note names all others that are on to the reader
of the checkpoint.
"""

from collections.abc import Mapping
from typing import Any

from megatron.convert.families.config_fields import ConfigReader, ModelSettings
from megatron.convert.formats.note_unknown_megatron_args import note_about_unknown_args
from megatron.convert.formats.pickle_as_data import GlobalName, PickledObject
from megatron.core.base.dataclass_flags import ConfigError

# These would change what the model computes, and are not supported.
_MUST_BE_OFF = (
    *("multi_latent_attention", "mtp_num_layers", "heterogeneous_layers_config_path", "qk_l2_norm"),
    *("heterogeneous_layers_config_encoded_json", "hybrid_override_pattern", "hybrid_layer_pattern", "is_hybrid_model"),
    *("attention_output_gate", "linear_attention_freq", "linear_attention_type", "experimental_attention_variant"),
    *("use_mup", "retro_add_retriever", "retro_project_dir", "geglu", "glu_activation", "parallel_attn"),
    *("embed_layernorm", "alibi", "sliding_window_size", "enable_mhc_connections", "num_moe_experts"),
    *("moe_latent_size", "moe_router_topk_limited_devices", "moe_n_hash_layers", "moe_router_force_biased"),
)
# These are read where another argument makes them effective, and mean nothing elsewhere.
_READ_IF_ASKED = (
    *("rotary_base", "rotary_percent", "rotary_interleaved", "rotary_seq_len_interpolation_factor", "rope_type"),
    *("use_rope_scaling", "rope_scaling_factor", "no_rope_freq", "num_query_groups", "window_attn_skip_freq"),
    *("num_layers", "encoder_num_layers", "norm_epsilon", "layernorm_epsilon", "bias_gelu_fusion"),
    *("add_position_embedding", "disable_bias_linear"),
    *("moe_router_topk", "moe_router_score_function", "moe_ffn_hidden_size", "moe_shared_expert_intermediate_size"),
    *("moe_router_num_groups", "moe_router_group_topk", "moe_router_topk_scaling_factor", "moe_expert_capacity_factor"),
    *("moe_shared_expert_gate", "moe_router_pre_softmax", "moe_router_enable_expert_bias", "moe_apply_probs_on_input"),
    *("moe_token_drop_policy", "moe_layer_freq"),
)
_BOOLS = (False, True)
_SCORES = ("softmax", "sigmoid", "sqrtsoftplus")
_MOST_LIST = 100_000
_MOST_TEXT = 100_000


def plain_args_from_pickle(value: Any) -> dict[str, Any]:
    """Return a namespace as plain values: numbers, texts and lists of them.

    Any other value becomes the name of its type.
    """
    if not isinstance(value, PickledObject) or not value.is_a("argparse.Namespace", "types.SimpleNamespace"):
        return {}
    state = value.state if isinstance(value.state, dict) else {}
    return {name: _plain(argument) for name, argument in state.items() if isinstance(name, str)}


def _plain(value: Any) -> Any:
    if isinstance(value, GlobalName):
        return str(value)
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, str):
        return value[:_MOST_TEXT]
    if isinstance(value, list | tuple) and len(value) <= _MOST_LIST:
        return [_plain(item) if not isinstance(item, list | tuple) else f"<{type(item).__name__}>" for item in value]
    return f"<{type(value).__name__}>"


def unknown_args_note(args: Mapping[str, Any]) -> str:
    """Return a note about arguments that may change the model and are not known here; "" if there are none."""
    reader = ConfigReader(args, "args")
    _settings(reader)
    return note_about_unknown_args(args, {*reader.keys_read, *_READ_IF_ASKED, *_MUST_BE_OFF})


def settings_of_args(args: Mapping[str, Any], source: str) -> ModelSettings:
    """Return the settings of the model, by names of `ModelConfig`.

    Raises ConfigError for arguments that are missing, contradict each other, or are not supported.
    """
    on = [name for name in _MUST_BE_OFF if args.get(name) not in (None, False, 0, "", [])]
    if on:
        shown = ", ".join(f"{name} ({args[name]!r:.40})" for name in on)
        raise ConfigError(f"{source}: the model was trained with {shown}, which cannot be read")
    return _settings(ConfigReader(args, source))


def _settings(reader: ConfigReader) -> ModelSettings:
    shape = _shape(reader)
    blocks = _block(reader) | _attention(reader) | _positions(reader)
    return shape | blocks | _experts(reader, shape["num_layers"]) | _training(reader)


def _first_present(reader: ConfigReader, *names: str) -> str:
    """Return the first of several names of an argument that is there; the first name if none is."""
    for name in names:
        if reader.values.get(name) is not None:
            return name
    return names[0]


def _shape(reader: ConfigReader) -> ModelSettings:
    heads = reader.count("num_attention_heads")
    is_grouped = reader.choice("group_query_attention", False, _BOOLS)
    groups = reader.count("num_query_groups", 1) if is_grouped else heads
    hidden = reader.count("hidden_size")
    width = reader.count("kv_channels", None)
    if heads % groups or (width is None and hidden % heads):
        raise reader.error("num_attention_heads", f"it must divide hidden_size, and be a multiple of {groups} groups")
    return {
        "num_layers": reader.count(_first_present(reader, "num_layers", "encoder_num_layers")),
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "ffn_hidden_size": reader.count("ffn_hidden_size", 4 * hidden),
        "kv_channels": width or hidden // heads,
        "group_query_attention": is_grouped,
        "num_query_groups": groups if is_grouped else 1,
        "max_position_embeddings": reader.count("max_position_embeddings"),
        "untie_embeddings_and_output_weights": reader.choice("untie_embeddings_and_output_weights", False, _BOOLS),
    }


def _block(reader: ConfigReader) -> ModelSettings:
    epsilon = _first_present(reader, "norm_epsilon", "layernorm_epsilon")
    # disable_bias_linear is in a few old checkpoints, add_bias_linear in all later ones.
    has_biases = reader.choice("add_bias_linear", not reader.choice("disable_bias_linear", False, _BOOLS), _BOOLS)
    settings: ModelSettings = {
        "normalization": reader.choice("normalization", "LayerNorm", ("LayerNorm", "RMSNorm")),
        "norm_epsilon": reader.number(epsilon, 1e-5),
        "apply_layernorm_1p": reader.choice("apply_layernorm_1p", False, _BOOLS),
        "add_bias_linear": has_biases,
        "add_qkv_bias": reader.choice("add_qkv_bias", False, _BOOLS),
    }
    if reader.choice("apply_residual_connection_post_layernorm", False, _BOOLS):
        settings["apply_residual_connection_post_layernorm"] = True
    clamp = reader.number("activation_func_clamp_value", None)
    if clamp is not None:
        settings["activation_func_clamp_value"] = clamp
    offset = reader.number("glu_linear_offset", 0.0)
    if offset:
        settings["glu_linear_offset"] = offset
    return settings | _activation(reader, has_biases)


def _activation(reader: ConfigReader, has_biases: bool) -> ModelSettings:
    kinds = ("swiglu", "quick_geglu", "squared_relu", "openai_gelu", "onnx_safe")
    on = [name for name in kinds if reader.choice(name, False, _BOOLS)]
    if len(on) > 1:
        raise ConfigError(f"{reader.source}: {' and '.join(on)} are all true; a model has one of them")
    # Megatron-LM's GELU is the tanh form where bias and activation are one kernel, and the exact one without.
    is_fused = reader.choice("bias_gelu_fusion", True, _BOOLS) and has_biases
    settings_of_kind: dict[str, ModelSettings] = {
        "swiglu": {"swiglu": True},
        "quick_geglu": {"gated": True, "activation": "quick-gelu"},
        "squared_relu": {"activation": "squared-relu"},
        "openai_gelu": {"activation": "gelu-tanh"},
        "onnx_safe": {"activation": "gelu"},
    }
    if on:
        return settings_of_kind[on[0]]
    return {"activation": "gelu-tanh" if is_fused else "gelu"}


def _attention(reader: ConfigReader) -> ModelSettings:
    settings: ModelSettings = {"qk_layernorm": reader.choice("qk_layernorm", False, _BOOLS)}
    softmax_type = reader.choice("softmax_type", "vanilla", ("vanilla", "off-by-one", "learnable"))
    if softmax_type != "vanilla":
        settings["softmax_type"] = softmax_type
    scale = reader.number("softmax_scale", None)
    if scale is not None:
        settings["softmax_scale"] = scale
    window = reader.get("window_size")
    if window is not None and window != [-1, 0]:
        if not isinstance(window, list) or len(window) != 2 or window[1] != 0 or type(window[0]) is not int:
            raise reader.error("window_size", "it must be two whole numbers, the second 0")
        settings["window_size"] = f"{window[0]},0"
        pattern = _layer_pattern(reader, "window_attn_skip_freq")
        if pattern:
            settings["window_attn_skip_freq"] = pattern
    return settings


def _layer_pattern(reader: ConfigReader, name: str) -> str | None:
    """Return a number N, or a list with 0 or 1 for each layer, in the spelling of our flags; None if it is absent."""
    value = reader.get(name)
    if value is None:
        return None
    if type(value) is int and value >= 1:
        return str(value)
    if not isinstance(value, list) or not all(flag in (0, 1) for flag in value):
        raise reader.error(name, "it must be a number, or a list of 0 and 1")
    return str([int(flag) for flag in value]).replace(" ", "")


def _positions(reader: ConfigReader) -> ModelSettings:
    kind = reader.choice("position_embedding_type", "learned_absolute", ("learned_absolute", "rope", "none"))
    # two flags from before position_embedding_type
    if reader.choice("use_rotary_position_embeddings", False, _BOOLS):
        kind = "rope"
    elif not reader.choice("add_position_embedding", True, _BOOLS) and kind == "learned_absolute":
        kind = "none"
    if kind != "rope":
        return {"position_embedding_type": kind}
    reader.choice("rope_type", "rope", ("rope",))
    settings: ModelSettings = {
        "position_embedding_type": kind,
        "rotary_base": reader.number("rotary_base", 10000.0),
        "rotary_percent": reader.number("rotary_percent", 1.0),
        "rotary_interleaved": reader.choice("rotary_interleaved", False, _BOOLS),
    }
    factor = reader.number("rotary_seq_len_interpolation_factor", None)
    if factor is not None:
        settings["rotary_seq_len_interpolation_factor"] = factor
    if reader.choice("use_rope_scaling", False, _BOOLS):
        settings |= {"use_rope_scaling": True, "rope_scaling_factor": reader.number("rope_scaling_factor", 8.0)}
    pattern = _layer_pattern(reader, "no_rope_freq")
    if pattern:
        settings["no_rope_freq"] = pattern
    return settings


def _experts(reader: ConfigReader, layers: int) -> ModelSettings:
    """Return the settings of experts, and of the choice among them; {} for a model without them."""
    experts = reader.count("num_experts", None) if reader.get("num_experts") else None
    if experts is None or experts == 1:
        return {}
    settings: ModelSettings = {
        "num_experts": experts,
        "moe_router_topk": reader.count("moe_router_topk", 2),
        "moe_router_score_function": reader.choice("moe_router_score_function", "softmax", _SCORES),
    }
    for name in ("moe_ffn_hidden_size", "moe_shared_expert_intermediate_size"):
        settings[name] = reader.count(name, None)
    for name in ("moe_router_num_groups", "moe_router_group_topk"):
        settings[name] = reader.count(name, None)
    for name in ("moe_router_topk_scaling_factor", "moe_expert_capacity_factor"):
        settings[name] = reader.number(name, None)
    for name in ("moe_shared_expert_gate", "moe_router_pre_softmax", "moe_router_enable_expert_bias"):
        settings[name] = reader.choice(name, False, _BOOLS)
    settings["moe_apply_probs_on_input"] = reader.choice("moe_apply_probs_on_input", False, _BOOLS)
    settings["moe_token_drop_policy"] = reader.choice("moe_token_drop_policy", "probs", ("probs", "position"))

    # A number N: layers 0, N, 2 N, ...; or a list with 1 for layers with experts.
    frequency = reader.get("moe_layer_freq", 1)
    if type(frequency) is int and frequency > 0:
        settings["moe_layer_freq"] = str(frequency)
    elif isinstance(frequency, list) and len(frequency) == layers and {*map(repr, frequency)} <= {"0", "1"}:
        settings["moe_layer_freq"] = str(frequency).replace(" ", "")
    else:
        raise reader.error("moe_layer_freq", f"it must be a number, or a list with 0 or 1 for each of {layers} layers")

    kinds = reader.get("moe_router_load_balancing_type", "aux_loss")
    if kinds in ("sinkhorn", ["sinkhorn"]):  # it changes the weights of a token's experts
        settings["moe_router_load_balancing_type"] = ["sinkhorn"]
    return {name: value for name, value in settings.items() if value is not None}


def _training(reader: ConfigReader) -> ModelSettings:
    """Return the settings that the run trained with, which another run may change."""
    settings: ModelSettings = {}
    for name in ("hidden_dropout", "attention_dropout"):
        settings[name] = reader.number(name, 0.1)
    half_precision = [name for name in ("bf16", "fp16") if reader.choice(name, False, _BOOLS)]
    if len(half_precision) > 1:
        raise ConfigError(f"{reader.source}: bf16 and fp16 are both true; a model has one of them")
    for name in half_precision:
        settings[name] = True
    settings["init_method_std"] = reader.number("init_method_std", 0.02)
    return settings
