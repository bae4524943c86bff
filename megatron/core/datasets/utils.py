"""Megatron's `Split`, and `compile_helpers`, which has nothing to compile."""

from collections.abc import Sequence
from enum import IntEnum

from megatron.core.base.lazy_imports import names_of_megatron

Split = IntEnum("Split", ["train", "valid", "test"], start=0)


def compile_helpers() -> None:
    """Do nothing: sample indices are built without compiled code."""


def get_blend_from_list(blend: Sequence[str] | None) -> tuple[list[str], list[float] | None] | None:
    """Return the words of --data-path as (prefixes, weights): weights and prefixes in turn, or prefixes alone.

    None if there are no words; the weights are None where only prefixes are given.
    """
    if not blend:
        return None
    words = [str(word) for word in blend]
    if len(words) % 2 == 0:
        try:
            weights = [float(word) for word in words[::2]]
        except ValueError:
            return words, None
        return words[1::2], weights
    return words, None


__getattr__ = names_of_megatron(__name__)
