"""Rotary position embedding: queries and keys are rotated by angles that grow with the position (arXiv:2104.09864)."""

import torch
from torch import Tensor


def rotary_angles(positions: Tensor, width: int, base: float, *, like: Tensor) -> Tensor:
    """The angle of each position and pair of features, in float32 (float64 for float64 activations).

    positions: [s, b], or [s, 1] if all texts share them -> [s, b or 1, width / 2]
    """
    dtype = torch.promote_types(like.dtype, torch.float32)
    wavelengths = base ** (torch.arange(0, width, 2, dtype=dtype, device=like.device) / width)
    return positions.to(like.device, dtype).unsqueeze(-1) * (1 / wavelengths)


def apply_rotary(x: Tensor, angles: Tensor) -> Tensor:
    """Rotate the first 2 x angles.shape[-1] features of each head; feature i is paired with feature i + width / 2.

    x: [s, b, n, d], angles: [s, b or 1, width / 2] -> [s, b, n, d]
    """
    return rotated(x, angles.cos().to(x.dtype), angles.sin().to(x.dtype))


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """`apply_rotary` by the cosines and sines of the angles."""
    half = cos.shape[-1]
    cos, sin = cos.unsqueeze(2), sin.unsqueeze(2)  # [s, b or 1, 1, width / 2]
    first, second = x[..., :half], x[..., half : 2 * half]
    rest = x[..., 2 * half :]
    return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), dim=-1)
