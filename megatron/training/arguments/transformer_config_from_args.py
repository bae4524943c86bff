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
    """Return the namespace of this process's command line, before a run checks it.

    Raises ConfigError with all problems at once.
    """
    return command_line.parse_args(None, extra_args_provider, defaults).args


def core_transformer_config_from_args(args: Any, config_class: type | None = None) -> Any:
    """Return the model's settings as a `config_class`: TransformerConfig, a subclass, or any dataclass.

    `args` fills the fields by their names. A field that `args` lacks or has as None keeps its default.
    """
    config_class = config_class or TransformerConfig
    values = {field.name: getattr(args, field.name, None) for field in fields(config_class)}
    if issubclass(config_class, TransformerConfig):
        switches = {name for name, value in vars(args).items() if value is True}

        # the dtypes
        params_dtype = torch.float32
        for name, dtype in (("fp16", torch.float16), ("bf16", torch.bfloat16), ("fp64", torch.float64)):
            if name in switches:
                params_dtype = dtype
                break
        values["params_dtype"] = params_dtype
        values["pipeline_dtype"] = torch.float32 if "fp32_residual_connection" in switches else params_dtype

        # fields with other names or types than the flags
        if "swiglu" in switches:
            values["gated_linear_unit"] = True
            values["activation_func"] = functional.silu
        values["layernorm_epsilon"] = getattr(args, "norm_epsilon", None)
        values["num_moe_experts"] = getattr(args, "num_experts", None)
        values["num_query_groups"] = args.num_query_groups if "group_query_attention" in switches else None
        values["num_layers_in_first_pipeline_stage"] = getattr(args, "decoder_first_pipeline_num_layers", None)
        values["num_layers_in_last_pipeline_stage"] = getattr(args, "decoder_last_pipeline_num_layers", None)
    return config_class(**{name: value for name, value in values.items() if value is not None})
