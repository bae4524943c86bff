"""Megatron's small helpers: exact division, initial values, wrapped models."""

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.torch_version import TorchVersion

from megatron.core.base.lazy_imports import lazy_names
from megatron.core.base.unsupported_arguments import takes
from megatron.core.sharding.placement import Normal


def ensure_divisibility(numerator: int, denominator: int) -> None:
    if numerator % denominator:
        raise ValueError(f"{numerator} is not divisible by {denominator}")


def divide(numerator: int, denominator: int) -> int:
    """The exact quotient; ValueError if there is none."""
    ensure_divisibility(numerator, denominator)
    return numerator // denominator


def init_method_normal(sigma: float) -> Normal:
    """Initial weights from N(0, sigma^2): a description, not a function of a tensor, so that a rank draws only its shard."""
    return Normal(sigma)


def scaled_init_method_normal(sigma: float, num_layers: int, multiplier: float = 2.0) -> Normal:
    """For the output matrix of each block: sigma / sqrt(2 num_layers), since the residual stream sums 2 num_layers outputs.

    multiplier: the outputs of a layer that it sums."""
    return Normal(sigma / math.sqrt(multiplier * num_layers))


def unwrap_model(model: Any, module_instances: tuple[type, ...] | None = None) -> Any:
    """The model, or each of a list of models, without its data-parallel wrapper."""
    if isinstance(model, list | tuple):
        return [unwrap_model(one, module_instances) for one in model]
    while isinstance(model, module_instances or nn.Module) and isinstance(getattr(model, "module", None), nn.Module):
        model = model.module
    return model


@takes("attr", allow_none=True)
def get_attr_wrapped_model(model: Any, attr: str, return_model_obj: bool = False) -> Any:
    """An attribute of the model inside its wrappers, or that model, if it has the attribute."""
    found = getattr(unwrap_model(model), attr)
    return unwrap_model(model) if return_model_obj else found


def is_torch_min_version(version: str, check_equality: bool = True) -> bool:
    """Whether torch is this version, or a later one."""
    mine = TorchVersion(torch.__version__)
    return mine >= version if check_equality else mine > version


def get_model_config(model: Any) -> Any:
    return get_attr_wrapped_model(model, "config")


if TYPE_CHECKING:
    from megatron.core.dist_checkpointing.mapping import (
        make_sharded_tensor_for_checkpoint as make_sharded_tensor_for_checkpoint,
        make_tp_sharded_tensor_for_checkpoint as make_tp_sharded_tensor_for_checkpoint,
    )
    from megatron.core.parallel_state import GlobalMemoryBuffer as GlobalMemoryBuffer

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "megatron.core.dist_checkpointing.mapping": (
            "make_sharded_tensor_for_checkpoint make_tp_sharded_tensor_for_checkpoint"
        ),
        "megatron.core.parallel_state": "GlobalMemoryBuffer",
    },
)
