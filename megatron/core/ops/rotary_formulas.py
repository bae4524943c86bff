"""The rotation of queries and keys by cosines and sines: halves of a head, or neighbours."""

from collections.abc import Callable

import torch
from torch import Tensor

# ---------------------------------------------------------------- the rotation
Rotation = Callable[[Tensor, Tensor, Tensor], Tensor]  # heads [s, b, n, d], cosines and sines [s, b or 1, width / 2]


def apply_rotary(x: Tensor, angles: Tensor, amplitude: float = 1.0, rotation: "Rotation | None" = None) -> Tensor:
    """Rotate the first 2 x angles.shape[-1] features of each head, by `rotated` unless told otherwise.

    x: [s, b, n, d], angles: [s, b or 1, width / 2] -> [s, b, n, d]. amplitude: times the rotated features.
    """
    return (rotation or rotated)(x, *cosines_and_sines(angles, amplitude, x.dtype))


def cosines_and_sines(angles: Tensor, amplitude: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    both = angles.cos(), angles.sin()
    cos, sin = both if amplitude == 1 else (x * amplitude for x in both)
    return cos.to(dtype), sin.to(dtype)


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Feature i is paired with feature i + width / 2."""
    half = cos.shape[-1]
    cos, sin = cos.unsqueeze(2), sin.unsqueeze(2)  # [s, b or 1, 1, width / 2]
    first, second = x[..., :half], x[..., half : 2 * half]
    rest = x[..., 2 * half :]
    return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), dim=-1)


def rotated_interleaved(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Feature 2 i is paired with feature 2 i + 1."""
    width = 2 * cos.shape[-1]
    cos, sin = cos.unsqueeze(2), sin.unsqueeze(2)
    first, second = x[..., :width:2], x[..., 1:width:2]
    turned = torch.stack((first * cos - second * sin, second * cos + first * sin), dim=-1).flatten(-2)
    return torch.cat((turned, x[..., width:]), dim=-1)
