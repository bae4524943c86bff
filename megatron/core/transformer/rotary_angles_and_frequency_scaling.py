"""Rotary position embedding: queries and keys are rotated by angles that grow with the position (arXiv:2104.09864)."""

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from megatron.core.transformer.position_config import Rope, RopeScaling


def rotary_angles(positions: Tensor, width: int, base: float, *, like: Tensor) -> Tensor:
    """Return the angle of each position and pair of features, in radians, float32 (float64 for float64 activations).

    positions: [s, b], or [s, 1] if all texts share them -> [s, b or 1, width / 2]. like: an activation of any shape,
    for dtype and device.
    """
    return _angles(positions, 1 / _wavelengths(width, base, like), like)


def angles_of_ropes(
    ropes: Sequence[Rope], positions: Tensor, width: int, text_length: int, *, like: Tensor
) -> Tensor | None:
    """Return the rotary angles of a model's ropes, in radians, float32 or wider; None if no layer rotates.

    They are [s, b or 1, width / 2] for one rope, [ropes, s, b or 1, width / 2] for more. text_length: in tokens, which
    some scalings depend on; other arguments are those of `rotary_angles`.
    """
    angles = [_angles(positions, _frequencies(rope, width, text_length, like), like) for rope in ropes]
    if not angles:
        return None
    return torch.stack(angles) if len(angles) > 1 else angles[0]


def _angles(positions: Tensor, frequencies: Tensor, like: Tensor) -> Tensor:
    """positions: [s, b or 1]; frequencies: [width / 2] -> [s, b or 1, width / 2]"""
    return positions.to(like.device, frequencies.dtype).unsqueeze(-1) * frequencies


def _wavelengths(width: int, base: float, like: Tensor) -> Tensor:
    """Return the tokens per radian of each pair of features: [width / 2], in float32 or wider."""
    dtype = torch.promote_types(like.dtype, torch.float32)
    return base ** (torch.arange(0, width, 2, dtype=dtype, device=like.device) / width)


# ---------------------------------------------------------------- scalings of the frequencies
def _frequencies(rope: Rope, width: int, text_length: int, like: Tensor) -> Tensor:
    """Return the radians per token of each pair of features: [width / 2], in float32 or wider."""
    base, scaling = rope
    if scaling is None:
        return 1 / _wavelengths(width, base, like)
    if scaling.rope_type == "dynamic":
        # The base for which the slowest pair turns over `text_length` as it turned over the original length.
        original_length = scaling.original_max_position_embeddings
        ratio = max(text_length, original_length) / original_length
        base *= (scaling.factor * ratio - scaling.factor + 1) ** (width / (width - 2))
        return 1 / _wavelengths(width, base, like)
    return _SCALED[scaling.rope_type](1 / _wavelengths(width, base, like), scaling, base, text_length)


def _linear(frequencies: Tensor, scaling: RopeScaling, base: float, text_length: int) -> Tensor:
    return frequencies / scaling.factor


def _llama3(frequencies: Tensor, scaling: RopeScaling, base: float, text_length: int) -> Tensor:
    """Scale frequencies [width / 2] as Llama 3.1.

    Pairs that turn often over the original length stay, pairs that turn seldom slow down. Pairs between low_freq_factor
    and high_freq_factor turns are blended.
    """
    turns = scaling.original_max_position_embeddings * frequencies / (2 * math.pi)
    low = scaling.low_freq_factor
    high = scaling.high_freq_factor
    keep = ((turns - low) / (high - low)).clamp(0, 1)  # 1: as it is, 0: divided by the factor
    return frequencies * keep + frequencies / scaling.factor * (1 - keep)


def _yarn(frequencies: Tensor, scaling: RopeScaling, base: float, text_length: int) -> Tensor:
    """Scale frequencies [width / 2] as YaRN (arXiv:2309.00071).

    It blends by the pair's index, between the pairs that turn beta_fast and beta_slow times.
    """
    width = 2 * len(frequencies)

    def pair_with(turns: float) -> float:
        return width * math.log(scaling.original_max_position_embeddings / (2 * math.pi * turns)) / (2 * math.log(base))

    first = pair_with(scaling.beta_fast)
    last = pair_with(scaling.beta_slow)
    if scaling.truncate:
        first = math.floor(first)
        last = math.ceil(last)
    first = max(first, 0)
    last = min(last, width - 1)
    pairs = torch.arange(width // 2, dtype=frequencies.dtype, device=frequencies.device)
    slowed = ((pairs - first) / ((last - first) or 0.001)).clamp(0, 1)
    return frequencies * (1 - slowed) + frequencies / scaling.factor * slowed


def _longrope(frequencies: Tensor, scaling: RopeScaling, base: float, text_length: int) -> Tensor:
    """Divide each of the frequencies [width / 2] by its own factor (arXiv:2402.13753).

    There is one list of factors for short texts and another for long ones.
    """
    is_long = text_length > scaling.original_max_position_embeddings
    divisors = scaling.long_factor if is_long else scaling.short_factor
    return frequencies / torch.tensor(divisors, dtype=frequencies.dtype, device=frequencies.device)


_SCALED: dict[str, Callable[[Tensor, RopeScaling, float, int], Tensor]] = {
    "linear": _linear,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
}
