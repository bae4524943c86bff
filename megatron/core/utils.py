"""Small helpers that Megatron's forks import from here."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from megatron.core.current_mesh import get_mesh
from megatron.core.placement import Normal


def ensure_divisibility(numerator: int, denominator: int) -> None:
    if numerator % denominator:
        raise ValueError(f"{numerator} is not divisible by {denominator}")


def divide(numerator: int, denominator: int) -> int:
    """The exact quotient; ValueError if there is none."""
    ensure_divisibility(numerator, denominator)
    return numerator // denominator


def init_method_normal(sigma: float) -> Normal:
    """Initial weights from N(0, sigma^2). A description and no function of a tensor, so that a rank draws only what it holds."""
    return Normal(sigma)


def scaled_init_method_normal(sigma: float, num_layers: int) -> Normal:
    """The same for the last matrix of each block, of which the residual stream adds up 2 x num_layers."""
    return Normal(sigma / math.sqrt(2.0 * num_layers))


def sequence_parallel_hint(given: int, expected: int) -> str:
    """What to change where hidden states are `given` tokens long instead of `expected`, if one is a multiple of the other, as it is
    where a model forgets that sequence parallelism divides them; else nothing."""
    if given > expected and given % expected == 0:
        return (
            f"; that is {given // expected} times as long: under --sequence-parallel each tensor-parallel rank holds its part of the "
            "sequence between the layers, so scatter it once, after the embedding (scatter_to_sequence_parallel_region of "
            "megatron.core.tensor_parallel, or its VocabParallelEmbedding with reduce_scatter_embeddings=True), or leave out "
            "--sequence-parallel"
        )
    if given < expected and expected % given == 0:
        return (
            f"; that is one part of {expected // given}: the model scatters the sequence over the tensor-parallel ranks; give "
            "--sequence-parallel, so that the layers know, or scatter only where config.sequence_parallel says so"
        )
    return ""


def unwrap_model(model: Any) -> Any:
    """The model, or each of a list of models, without its data-parallel wrapper."""
    if isinstance(model, list | tuple):
        return [unwrap_model(one) for one in model]
    while isinstance(getattr(model, "module", None), nn.Module):
        model = model.module
    return model


def get_attr_wrapped_model(model: Any, attr: str) -> Any:
    """`model.attr` of a model that may be wrapped."""
    return getattr(unwrap_model(model), attr)


def get_model_config(model: Any) -> Any:
    return get_attr_wrapped_model(model, "config")


class GlobalMemoryBuffer:
    """Tensors that are handed out again under the same name, so that a transient of every layer is allocated once."""

    def __init__(self) -> None:
        self.buffer: dict[tuple[str, torch.dtype], torch.Tensor] = {}

    def get_tensor(self, tensor_shape: Sequence[int], dtype: torch.dtype, name: str) -> torch.Tensor:
        """Uninitialised; the one handed out under this name before must be done with."""
        numel = torch.Size(tensor_shape).numel()
        kept = self.buffer.get((name, dtype))
        if kept is None or kept.numel() < numel:
            kept = self.buffer[name, dtype] = torch.empty(numel, dtype=dtype, device=get_mesh().device)
        return kept[:numel].view(tuple(tensor_shape))
