"""Megatron's `parse_args` and `core_transformer_config_from_args`."""

from collections.abc import Callable
from dataclasses import fields
from typing import Any

import torch
from torch.nn import functional

from megatron.core.base.unsupported_arguments import accepts_defaults_only
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.training.arguments import command_line


@accepts_defaults_only(ignore_unknown_args=False)
def parse_args(
    extra_args_provider: Callable[[Any], Any] | None = None, *, defaults: dict[str, Any] | None = None
) -> Any:
    """The namespace of this process's command line, before a run checks it. Raises ConfigError with all problems at once."""
    return command_line.parse_args(None, extra_args_provider, defaults).args


def core_transformer_config_from_args(args: Any, config_class: type | None = None) -> Any:
    """The model's settings as a `config_class`: TransformerConfig, a subclass, or any dataclass, whose fields `args`
    fills by
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
