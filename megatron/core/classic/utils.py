"""Megatron's helpers: initial values, wrapped models, divided tensors."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from megatron.core.base.signatures import takes
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


def get_model_config(model: Any) -> Any:
    return get_attr_wrapped_model(model, "config")


def split_tensor_along_last_dim(
    tensor: Tensor, num_partitions: int, contiguous_split_chunks: bool = False
) -> Sequence[Tensor]:
    """Equal parts of the last dimension: views, or contiguous copies."""
    parts = torch.split(tensor, divide(tensor.shape[-1], num_partitions), dim=-1)
    return tuple(part.contiguous() for part in parts) if contiguous_split_chunks else parts


class VocabUtility:
    """The rows [first, last) of the vocabulary on a rank."""

    @staticmethod
    def vocab_range_from_per_partition_vocab_size(
        per_partition_vocab_size: int, rank: int, world_size: int
    ) -> tuple[int, int]:
        del world_size  # in Megatron's signature
        return rank * per_partition_vocab_size, (rank + 1) * per_partition_vocab_size

    @staticmethod
    def vocab_range_from_global_vocab_size(global_vocab_size: int, rank: int, world_size: int) -> tuple[int, int]:
        per_rank = divide(global_vocab_size, world_size)
        return VocabUtility.vocab_range_from_per_partition_vocab_size(per_rank, rank, world_size)
