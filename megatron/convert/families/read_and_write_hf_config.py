"""Read a config.json as settings of ours, and write it from them, by the fields of a family's table.

A written file is read back and must describe a model that computes the same: an option that a family cannot express
stops the export with its name, and is never dropped silently.
"""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from megatron.convert.families.config_fields import ConfigReader, ModelSettings, dtype_in
from megatron.convert.families.hf_family_fields_and_param_mappings import Family
from megatron.convert.families.keys_without_effect import reason_without_effect
from megatron.convert.families.registry import FAMILIES
from megatron.core.base.dataclass_flags import ConfigError, option_fields
from megatron.core.transformer.model_config import LossConfig, ModelConfig, PrecisionConfig, RecomputeConfig


def _windows(model: ModelConfig) -> list[int | None]:
    return [model.window_left(i) for i in range(model.num_layers)]


def _rotary_positions(model: ModelConfig) -> list[Any]:
    """Return each layer's rotary embedding as it is computed; None for a layer without one."""
    ropes = []
    for i in range(model.num_layers):
        rope = model.rope_of(i)
        ropes.append(None if rope is None else model.ropes[rope].as_computed)
    return ropes


def _layers_with_experts(model: ModelConfig) -> list[bool]:
    return [model.is_moe_layer(i) for i in range(model.num_layers)]


def _dense_width(model: ModelConfig) -> int | None:
    """Return the width of the MLP of layers without experts; None if there is no such layer."""
    return None if all(_layers_with_experts(model)) else model.ffn_size


def _shared_width(model: ModelConfig) -> int | None:
    return model.moe_shared_expert_intermediate_size if model.has_experts else None


def _choice_of_experts(model: ModelConfig) -> dict[str, Any] | None:
    """Return how the experts of a token are chosen and weighted; None for a model without experts."""
    if not model.has_experts:
        return None
    names = ("moe_router_topk", *_SETTINGS_OF_CHOICE)
    score_function, pre_softmax = model.router_weights
    values = {name: getattr(model, name) for name in names}
    if model.moe_router_group_topk is None:
        values["moe_router_num_groups"] = None  # read by nothing else
    return values | {"moe_router_score_function": score_function, "moe_router_pre_softmax": pre_softmax}


_SETTINGS_OF_CHOICE = (
    *("moe_router_score_function", "moe_router_pre_softmax", "moe_router_topk_scaling_factor", "moe_router_bias"),
    *("moe_router_num_groups", "moe_router_group_topk", "moe_router_enable_expert_bias", "moe_apply_probs_on_input"),
)
# Groups of settings that together mean one property of a `ModelConfig`, which is compared instead of them.
_JOINT_PROPERTIES = {
    "MLP width": (("ffn_hidden_size",), _dense_width),
    "width of experts": (("moe_ffn_hidden_size",), lambda model: model.expert_ffn_size if model.has_experts else None),
    "number of experts": (("num_experts",), lambda model: model.num_experts if model.has_experts else None),
    "layers with experts": (("moe_layer_freq",), _layers_with_experts),
    "choice of experts": (("moe_router_topk", *_SETTINGS_OF_CHOICE), _choice_of_experts),
    "width of shared experts": (("moe_shared_expert_intermediate_size",), _shared_width),
    "gate of shared experts": (
        ("moe_shared_expert_gate",),
        lambda model: model.moe_shared_expert_gate if _shared_width(model) else None,
    ),
    "capacity of experts": (("moe_expert_capacity_factor",), lambda model: model.capacity_factor),
    "decoder layers": (("decoder_num_layers",), lambda model: model.decoder_layers),
    "head width": (("kv_channels",), lambda model: model.head_width),
    "key/value heads": (("group_query_attention", "num_query_groups"), lambda model: model.query_groups),
    "activation": (("swiglu", "gated", "activation"), lambda model: model.activation_region),
    "windows": (("window_size", "window_attn_skip_freq"), _windows),
    "rotary positions": (
        ("rotary_base", "rotary_base_of_windows", "no_rope_freq", "rotary_seq_len_interpolation_factor")
        + ("use_rope_scaling", "rope_scaling_factor", "rope_scaling"),
        _rotary_positions,
    ),
    "biases": (
        ("add_bias_linear", "add_qkv_bias", "add_attention_output_bias", "add_mlp_bias"),
        lambda model: {"qkv": model.has_qkv_bias, "output": model.has_proj_bias, "MLP": model.has_mlp_bias},
    ),
    "biases of norms": (("norm_bias",), lambda model: model.normalization == "LayerNorm" and model.norm_bias),
}
# Settings of training, which do not change what the weights compute.
_NOT_OF_THE_MODEL = {
    *(
        "hidden_dropout",
        "attention_dropout",
        "init_method_std",
        "attention_backend",
        "make_vocab_size_divisible_by",
        "pad_vocab_size",
    ),
    *(f.name for kind in (LossConfig, PrecisionConfig, RecomputeConfig) for f in fields(kind)),
    *("compile", "init_method_xavier_uniform", "embedding_init_method_std"),
    # of experts: losses, precision and dispatch
    *("moe_router_load_balancing_type", "moe_aux_loss_coeff", "moe_z_loss_coeff", "moe_input_jitter_eps"),
    *(
        "moe_router_dtype",
        "moe_router_bias_update_rate",
        "moe_router_force_load_balancing",
        "moe_enable_routing_replay",
    ),
    *("moe_token_drop_policy", "moe_pad_expert_input_to_capacity", "moe_token_dispatcher_type", "moe_grouped_gemm"),
    *("moe_shared_expert_overlap",),
}


def effective_settings(model: ModelConfig) -> dict[str, Any]:
    """Return all that distinguishes two models, with one value for each meaning."""
    joint = {name: value_of(model) for name, (_, value_of) in _JOINT_PROPERTIES.items()}
    covered = _NOT_OF_THE_MODEL.union(*(names for names, _ in _JOINT_PROPERTIES.values()))
    return joint | {f.name: getattr(model, f.name) for f in option_fields(ModelConfig) if f.name not in covered}


def family_of(config: Mapping[str, Any], source: str) -> Family:
    """Return the table of a config's model_type. Raises ConfigError for one that has no table."""
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in FAMILIES:
        known = ", ".join(sorted(FAMILIES))
        raise ConfigError(f"{source}: model_type is {kind!r:.60}; only these can be read: {known}")
    return FAMILIES[kind]


def settings_of(config: Mapping[str, Any], source: str) -> tuple[ModelSettings, int]:
    """Return (the settings of the model that a config.json describes, by names of `ModelConfig`; its vocabulary size).

    Raises ConfigError for a key that its family's table does not know, and for an option that is not supported.
    """
    family = family_of(config, source)
    reader = ConfigReader(config, source)
    default_vocab_size = [family.vocab_size] if family.vocab_size else []
    vocab_size = reader.count("vocab_size", *default_vocab_size)
    dtype_in(reader)
    settings = dict(family.settings)
    for field in family.fields:
        reader.keys_read.update(field.keys)
        settings |= field.read(reader)
    if "window_size" not in settings:  # no layer uses the base of layers with a window
        settings.pop("rotary_base_of_windows", None)
    unknown = []
    for key in sorted(config.keys() - reader.keys_read):
        if reason_without_effect(key, config[key]) is None:
            unknown.append(key)
    if unknown:
        which = ", ".join(f"{name} ({config[name]!r:.40})" for name in unknown)
        raise ConfigError(
            f"{source}: the settings {which} of model_type {config['model_type']} are unknown; without them it is "
            "not certain what the model computes, so nothing is read"
        )
    unsupported = sorted(settings.keys() - {f.name for f in fields(ModelConfig)})
    if unsupported:
        raise ConfigError(f"{source}: this model needs {', '.join(unsupported)}, which is not supported")
    return settings, vocab_size


def model_config_of(settings: ModelSettings, source: str) -> ModelConfig:
    """Return the settings of `settings_of` as a `ModelConfig`. Raises ConfigError, with the file, for a model that cannot be."""
    try:
        return ModelConfig(**settings)
    except ConfigError as error:  # in the words of flags
        raise ConfigError(f"{source}: the model that it describes cannot be built: {error}") from None


def config_of(kind: str, model: ModelConfig, vocab_size: int, dtype: str) -> dict[str, Any]:
    """Return the config.json of a model of the family `kind`, in the spellings of transformers 4 and 5.

    Raises ConfigError, with the options that differ, if the family cannot describe what the model computes.
    """
    family = FAMILIES[kind]
    config = {"model_type": kind, "architectures": [family.architecture], "vocab_size": vocab_size}
    config |= {"dtype": dtype, "torch_dtype": dtype}
    for field in family.fields:
        config |= field.write(model)
    # Read it back: it must describe the same model.
    settings, _ = settings_of(config, f"as a {kind}")
    expected = effective_settings(model)
    read_back = effective_settings(ModelConfig(**settings))
    differing = []
    for name in expected:
        if expected[name] != read_back[name]:
            differing.append(f"{name} {expected[name]!r:.80} (it would be {read_back[name]!r:.80})")
    if differing:
        raise ConfigError(f"a {kind} cannot express the settings of this model: {'; '.join(differing)}")
    return config


def kind_of(model_class: str, model: ModelConfig, vocab_size: int, requested: str | None = None) -> str:
    """Return the family to write a model as: `requested`, else the first that can describe what it computes.

    Raises ConfigError with what `requested`, or the family that comes closest, cannot describe.
    """
    if requested is not None:
        family_of({"model_type": requested}, "what is to be written")
        candidates = [requested]
    else:
        candidates = [kind for kind, family in FAMILIES.items() if family.model == model_class]
    problems = []
    for kind in candidates:
        try:
            config_of(kind, model, vocab_size, "float32")
        except ConfigError as error:
            problems.append(str(error))
        else:
            return kind
    # The closest family differs in the fewest values; one that fails in another way does not describe such a model at all.
    closest = min(problems, key=lambda text: ("it would be" not in text, len(text)))
    more = "; nor can another family, with more in the way" if len(problems) > 1 else ""
    raise ConfigError(closest + more)
