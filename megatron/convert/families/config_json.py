"""A config.json as settings of ours, and back, by the fields of a family's table.

A file that is written is read again, and must give a model that computes the same: so an option that a family cannot say
stops
the export by name, and is not left out.
"""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from megatron.convert.families.config_fields import Given, ModelSettings, dtype_in
from megatron.convert.families.family import Family
from megatron.convert.families.registry import FAMILIES
from megatron.core.base.dataclass_flags import ConfigError, option_fields
from megatron.core.transformer.model_config import LossConfig, ModelConfig, PrecisionConfig, RecomputeConfig

# What settings together say, by properties of a `ModelConfig`; they are compared instead of these settings.
_SAID_TOGETHER = {
    "MLP width": (("ffn_hidden_size",), lambda model: model.ffn_size),
    "decoder layers": (("decoder_num_layers",), lambda model: model.decoder_layers),
    "head width": (("kv_channels",), lambda model: model.head_width),
    "key/value heads": (("group_query_attention", "num_query_groups"), lambda model: model.query_groups),
    "activation": (("swiglu", "gated", "activation"), lambda model: model.activation_region),
    "windows": (
        ("window_size", "window_attn_skip_freq"),
        lambda model: [model.window_left(i) for i in range(model.num_layers)],
    ),
    "rotary positions": (
        ("rotary_base", "rotary_base_of_windows", "no_rope_freq", "rotary_seq_len_interpolation_factor")
        + ("use_rope_scaling", "rope_scaling_factor", "rope_scaling"),
        lambda model: [
            None if (rope := model.rope_of(i)) is None else model.ropes[rope].as_computed
            for i in range(model.num_layers)
        ],
    ),
    "biases": (
        ("add_bias_linear", "add_qkv_bias", "add_attention_output_bias", "add_mlp_bias"),
        lambda model: {"qkv": model.has_qkv_bias, "output": model.has_proj_bias, "MLP": model.has_mlp_bias},
    ),
    "biases of norms": (("norm_bias",), lambda model: model.normalization == "LayerNorm" and model.norm_bias),
}
_NOT_OF_THE_MODEL = {
    *("hidden_dropout", "attention_dropout", "init_method_std", "attention_backend", "make_vocab_size_divisible_by"),
    *(f.name for kind in (LossConfig, PrecisionConfig, RecomputeConfig) for f in fields(kind)),
    *("compile", "init_method_xavier_uniform", "embedding_init_method_std"),
}


def what_it_computes(model: ModelConfig) -> dict[str, Any]:
    """All that tells two models apart, one value for each meaning."""
    together = {name: said(model) for name, (_, said) in _SAID_TOGETHER.items()}
    covered = _NOT_OF_THE_MODEL.union(*(names for names, _ in _SAID_TOGETHER.values()))
    return together | {f.name: getattr(model, f.name) for f in option_fields(ModelConfig) if f.name not in covered}


def family_of(config: Mapping[str, Any], source: str) -> Family:
    """The table of a config's model_type. Raises ConfigError for one that no table describes."""
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in FAMILIES:
        known = ", ".join(sorted(FAMILIES))
        raise ConfigError(f"{source}: model_type {kind!r:.60} is not among those that are read: {known}")
    return FAMILIES[kind]


def settings_of(config: Mapping[str, Any], source: str) -> tuple[ModelSettings, int]:
    """(the settings of the model that a config.json describes, by names of `ModelConfig`; the rows of its word table).

    Raises ConfigError for a key that its family's table does not understand, and for an option that is not built.
    """
    family, given = family_of(config, source), Given(config, source)
    words = given.count("vocab_size", *([family.vocab_size] if family.vocab_size else []))
    dtype_in(given)
    settings = dict(family.settings)
    for field in family.fields:
        given.asked.update(field.keys)
        settings |= field.read(given)
    if "window_size" not in settings:  # the base of layers that the model has none of
        settings.pop("rotary_base_of_windows", None)
    if unknown := sorted(config.keys() - given.asked):
        which = ", ".join(f"{name} ({config[name]!r:.40})" for name in unknown)
        raise ConfigError(
            f"{source}: the table of {config['model_type']} does not know {which}; what a model computes is never guessed"
        )
    if unbuilt := sorted(settings.keys() - {f.name for f in fields(ModelConfig)}):
        raise ConfigError(f"{source}: this model needs {', '.join(unbuilt)}, which is not built")
    return settings, words


def config_of(kind: str, model: ModelConfig, words: int, dtype: str) -> dict[str, Any]:
    """The config.json of a model as one of the family `kind`, in the spellings of transformers 4 and 5.

    Raises ConfigError if the family cannot say what the model computes, with the options that stand in the way.
    """
    family = FAMILIES[kind]
    config = {"model_type": kind, "architectures": [family.architecture], "vocab_size": words}
    config |= {"dtype": dtype, "torch_dtype": dtype}
    for field in family.fields:
        config |= field.write(model)
    source = f"as a {kind}"
    mine, theirs = (what_it_computes(one) for one in (model, ModelConfig(**settings_of(config, source)[0])))
    if differing := [
        f"{name} {mine[name]!r:.80} (it would be {theirs[name]!r:.80})" for name in mine if mine[name] != theirs[name]
    ]:
        raise ConfigError(f"a {kind} cannot say what this model computes: {'; '.join(differing)}")
    return config


def kind_of(name: str, model: ModelConfig, words: int, kept: str | None = None) -> str:
    """The family to write a model as: `kept`, that it came from, else the first that can say what it computes.

    name: of the model's class. Raises ConfigError with what stands in the way of `kept`, or of the family where least does.
    """
    if kept is not None:
        family_of({"model_type": kept}, "what is to be written")
    problems = []
    for kind in [kept] if kept is not None else [kind for kind, family in FAMILIES.items() if family.model == name]:
        try:
            config_of(kind, model, words, "float32")
        except ConfigError as error:
            problems.append(str(error))
        else:
            return kind
    nearest = min(problems, key=lambda text: ("it would be" not in text, len(text)))  # others are not even such a model
    raise ConfigError(nearest + "; nor can another family, with more in the way" * (len(problems) > 1))
