"""The rotation of queries and keys by cosines and sines (RoPE, arXiv:2104.09864).

Features of the two halves of a head rotate as pairs, or neighbours.
"""

from collections.abc import Callable

import torch
from torch import Tensor

Rotation = Callable[[Tensor, Tensor, Tensor], Tensor]  # heads [s, b, .., d], cosines and sines [s, b or 1, width / 2]


def cosines_and_sines(angles: Tensor, amplitude: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the cosines and sines of angles, times the amplitude, rounded to dtype.

    angles: [s, b or 1, width / 2]; both results have this shape.
    """
    cos = angles.cos()
    sin = angles.sin()
    if amplitude != 1:
        cos = cos * amplitude
        sin = sin * amplitude
    return cos.to(dtype), sin.to(dtype)


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate pairs of features i and i + width / 2.

    x: [s, b, .., d], of heads or groups of heads; cos, sin: [s, b or 1, width / 2] -> the shape of x
    """
    half = cos.shape[-1]
    cos = _for_heads(cos, x)
    sin = _for_heads(sin, x)
    # a split, whose backward is one pass; that of a slice sets zeros and adds for the whole head
    first, second, rest = x.split([half, half, x.shape[-1] - 2 * half], dim=-1)  # the rest is not rotated
    return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), dim=-1)


def rotated_interleaved(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate pairs of features 2 i and 2 i + 1. x: [s, b, .., d], cos, sin: [s, b or 1, width / 2] -> the shape of x"""
    width = 2 * cos.shape[-1]
    cos = _for_heads(cos, x)
    sin = _for_heads(sin, x)
    first = x[..., :width:2]
    second = x[..., 1:width:2]
    rest = x[..., width:]  # not rotated
    pairs = torch.stack((first * cos - second * sin, second * cos + first * sin), dim=-1)  # [s, b, .., width / 2, 2]
    return torch.cat((pairs.flatten(-2), rest), dim=-1)


def _for_heads(factors: Tensor, x: Tensor) -> Tensor:
    """Return factors [s, b or 1, width / 2] as they multiply all heads of x [s, b, .., d]: [s, b or 1, 1.., width / 2]."""
    s, b, half = factors.shape
    return factors.view(s, b, *(1,) * (x.dim() - 3), half)
