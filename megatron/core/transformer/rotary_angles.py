"""Rotary position embedding: queries and keys are rotated by angles that grow with the position (arXiv:2104.09864)."""

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from megatron.core.transformer.position_config import Rope, RopeScaling


def rotary_angles(positions: Tensor, width: int, base: float, *, like: Tensor) -> Tensor:
    """The angle of each position and pair of features, in float32 (float64 for float64 activations).

    positions: [s, b], or [s, 1] if all texts share them -> [s, b or 1, width / 2]
    """
    return _angles(positions, 1 / _wavelengths(width, base, like), like)


def angles_of(ropes: Sequence[Rope], positions: Tensor, width: int, tokens: int, *, like: Tensor) -> Tensor | None:
    """The angles of a model whose layers rotate in these ways: as `rotary_angles` if there is one way, [ways, ...] if
    there are
    more, None if no layer rotates. tokens: the length of the texts, which some scalings depend on."""
    made = [_angles(positions, _frequencies(rope, width, tokens, like), like) for rope in ropes]
    return torch.stack(made) if len(made) > 1 else made[0] if made else None


def _angles(positions: Tensor, frequencies: Tensor, like: Tensor) -> Tensor:
    return positions.to(like.device, frequencies.dtype).unsqueeze(-1) * frequencies


def _wavelengths(width: int, base: float, like: Tensor) -> Tensor:
    dtype = torch.promote_types(like.dtype, torch.float32)
    return base ** (torch.arange(0, width, 2, dtype=dtype, device=like.device) / width)


# ---------------------------------------------------------------- scalings of the frequencies
def _frequencies(rope: Rope, width: int, tokens: int, like: Tensor) -> Tensor:
    base, scaling = rope
    if scaling is None:
        return 1 / _wavelengths(width, base, like)
    if scaling.rope_type == "dynamic":
        # The base for which the slowest pair turns over `tokens` as it turned over the old length.
        ratio = max(tokens, scaling.original_max_position_embeddings) / scaling.original_max_position_embeddings
        base *= (scaling.factor * ratio - scaling.factor + 1) ** (width / (width - 2))
        return 1 / _wavelengths(width, base, like)
    return _SCALED[scaling.rope_type](1 / _wavelengths(width, base, like), scaling, base, tokens)


def _linear(frequencies: Tensor, scaling: RopeScaling, base: float, tokens: int) -> Tensor:
    return frequencies / scaling.factor


def _llama3(frequencies: Tensor, scaling: RopeScaling, base: float, tokens: int) -> Tensor:
    """Pairs that turn often over the old length stay, pairs that turn seldom are slowed down, and those between are
    blended."""
    turns = scaling.original_max_position_embeddings * frequencies / (2 * math.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    stays = ((turns - low) / (high - low)).clamp(0, 1)
    return frequencies * stays + frequencies / scaling.factor * (1 - stays)


def _yarn(frequencies: Tensor, scaling: RopeScaling, base: float, tokens: int) -> Tensor:
    """As `_llama3`, blended by the number of the pair between those that turn `beta_fast` and `beta_slow` times."""
    width = 2 * len(frequencies)

    def pair_with(turns: float) -> float:
        return width * math.log(scaling.original_max_position_embeddings / (2 * math.pi * turns)) / (2 * math.log(base))

    first, last = pair_with(scaling.beta_fast), pair_with(scaling.beta_slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, width - 1)
    pairs = torch.arange(width // 2, dtype=frequencies.dtype, device=frequencies.device)
    slowed = ((pairs - first) / ((last - first) or 0.001)).clamp(0, 1)
    return frequencies * (1 - slowed) + frequencies / scaling.factor * slowed


def _longrope(frequencies: Tensor, scaling: RopeScaling, base: float, tokens: int) -> Tensor:
    is_long = tokens > scaling.original_max_position_embeddings
    divisors = scaling.long_factor if is_long else scaling.short_factor
    return frequencies / torch.tensor(divisors, dtype=frequencies.dtype, device=frequencies.device)


_SCALED: dict[str, Callable[[Tensor, RopeScaling, float, int], Tensor]] = {
    "linear": _linear,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
}
