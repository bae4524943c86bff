"""`TransformerConfig` with the fields of Megatron core 0.5 to 0.16, which scripts read, assign and extend.

transformer_config.toml has the fields, their defaults, and those that are refused.

TransformerConfig(num_layers=2, hidden_size=12, num_attention_heads=4)
core_transformer_config_from_args(args)         of the command line
model_config(config)                            the settings that our layers are built from
"""

from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch.nn import functional

from megatron.core.classic.utils import init_method_normal, scaled_init_method_normal
from megatron.core.config import ConfigError
from megatron.core.config_fields import dataclass_of, read_fields
from megatron.core.transformer.model_config import ModelConfig

_FIELDS = read_fields(__file__, "transformer_config")
_OF_RANKS = {name: _FIELDS.defaults[name] for name in _FIELDS.groups["model_parallel"]}
_Ranks = dataclass_of("_Ranks", _OF_RANKS)
_REST = {name: value for name, value in _FIELDS.defaults.items() if name not in _OF_RANKS}
_Fields = dataclass_of("_Fields", _REST, (_Ranks,))


@dataclass
class ModelParallelConfig(_Ranks):
    """How ranks share a layer and a pipeline, and in which dtypes they compute."""


@dataclass
class TransformerConfig(_Fields, ModelParallelConfig):
    """A model's settings by Megatron's names. Fields that are built nowhere here are refused once a model is made of them."""

    def __post_init__(self) -> None:
        self.ffn_hidden_size = self.ffn_hidden_size or 4 * self.hidden_size
        self.num_query_groups = self.num_query_groups or self.num_attention_heads
        self.kv_channels = self.kv_channels or self.hidden_size // max(1, self.num_attention_heads)
        self.init_method = self.init_method or init_method_normal(self.init_method_std)
        scaled = scaled_init_method_normal(self.init_method_std, max(1, self.num_layers))
        self.output_layer_init_method = self.output_layer_init_method or scaled


def core_transformer_config_from_args(args: Any, config_class: type | None = None) -> Any:
    """The model's settings as a `config_class`: TransformerConfig, a subclass, or any dataclass, whose fields `args` fills by
    their names. What `args` lacks, or holds as None, keeps its default."""
    config_class = config_class or TransformerConfig
    values = {one.name: getattr(args, one.name, None) for one in fields(config_class)}
    if issubclass(config_class, TransformerConfig):
        flags = {name for name, on in vars(args).items() if on is True}
        kinds = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp64": torch.float64}
        params_dtype = next((dtype for name, dtype in kinds.items() if name in flags), torch.float32)
        gated = {"gated_linear_unit": True, "activation_func": functional.silu} if "swiglu" in flags else {}
        values |= gated | {
            "params_dtype": params_dtype,
            "pipeline_dtype": torch.float32 if "fp32_residual_connection" in flags else params_dtype,
            "layernorm_epsilon": getattr(args, "norm_epsilon", None),
            "num_query_groups": args.num_query_groups if "group_query_attention" in flags else None,
            "num_layers_in_first_pipeline_stage": getattr(args, "decoder_first_pipeline_num_layers", None),
            "num_layers_in_last_pipeline_stage": getattr(args, "decoder_last_pipeline_num_layers", None),
        }
    return config_class(**{name: value for name, value in values.items() if value is not None})


def model_config(config: Any, base: ModelConfig | None = None, **options: Any) -> ModelConfig:
    """The settings that our layers are built from. base: of the run, for what Megatron's config has no field for. options:
    further settings by our names, of a model's own arguments. Raises ConfigError for what is not built."""
    if isinstance(config, ModelConfig):
        return replace(config, **options)
    if problems := _problems(config):
        raise ConfigError(problems)
    values = {one.name: getattr(config, one.name) for one in fields(ModelConfig) if one.name in _FIELDS.defaults}
    values |= {
        "norm_epsilon": config.layernorm_epsilon,
        "swiglu": config.gated_linear_unit,
        "group_query_attention": config.num_query_groups != config.num_attention_heads,
        "num_query_groups": config.num_query_groups if config.num_query_groups != config.num_attention_heads else 1,
        "bf16": config.bf16 or config.params_dtype is torch.bfloat16,
        "fp16": config.fp16 or config.params_dtype is torch.float16,
        "fp64": config.params_dtype is torch.float64,
        "window_size": ",".join(map(str, config.window_size)) if config.window_size else None,
        "window_attn_skip_freq": str(config.window_attn_skip_freq) if config.window_attn_skip_freq else None,
        "attention_backend": getattr(config.attention_backend, "name", config.attention_backend),
    }
    kept = ("recompute_modules", "distribute_saved_activations")  # None in Megatron where it means our default
    values = {name: value for name, value in values.items() if not (name in kept and value is None)}
    return replace(base or ModelConfig(), **{**values, **options})


def _problems(config: Any) -> list[str]:
    """Why our layers cannot compute what a config says."""
    problems = _FIELDS.problems(config)
    known = functional.silu if config.gated_linear_unit else functional.gelu
    if config.activation_func is not known:
        name = getattr(config.activation_func, "__name__", config.activation_func)
        problems.append(
            f"TransformerConfig: activation_func {name} with gated_linear_unit={config.gated_linear_unit} is not built yet; use "
            "torch.nn.functional.gelu, or silu with gated_linear_unit=True"
        )
    return problems
