"""Megatron's `parse_args` and `get_model`."""

from collections.abc import Callable
from typing import Any

from torch import nn

from megatron.core.base.signatures import takes
from megatron.core.enums import ModelType
from megatron.training.arguments import command_line
from megatron.training.build import built_chunks
from megatron.training.global_vars import get_runtime
from megatron.training.model_chunks import ModelProvider


@takes(ignore_unknown_args=False)
def parse_args(
    extra_args_provider: Callable[[Any], Any] | None = None, *, defaults: dict[str, Any] | None = None
) -> Any:
    """The namespace of this process's command line, before a run checks it. Raises ConfigError with all problems at once."""
    return command_line.parse_args(None, extra_args_provider, defaults).args


@takes(wrap_with_ddp=True, config=None, pg_collection=None)
def get_model(
    model_provider_func: ModelProvider, model_type: ModelType = ModelType.encoder_or_decoder
) -> list[nn.Module]:
    """This rank's chunks in order, wrapped in their buffers, after `initialize_megatron`. Every rank must call."""
    del model_type  # a model's `boundary` says which tensors pass between stages
    return list(built_chunks(model_provider_func, get_runtime()).values())
