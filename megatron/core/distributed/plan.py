"""Where each parameter lies in which contiguous buffer. Pure integers.

    [ final norm | layer 1 fc2 |..| layer 0 qkv |..| embedding ]       one buffer per (reduce group, dtype)

Parameters are laid in reverse order of creation, the order in which a backward finishes their gradients, each start aligned.
"""

from collections.abc import Hashable
from dataclasses import dataclass

ALIGN = 8  # elements, 16 bytes in bfloat16: what matrix units ask of an operand; costs nothing in common shapes


@dataclass(frozen=True)
class Item:
    """One parameter to be placed."""

    name: str
    numel: int
    key: Hashable  # parameters of one key share a buffer


@dataclass(frozen=True)
class Slot:
    """Elements start .. stop of a buffer belong to this parameter."""

    name: str
    start: int
    stop: int


@dataclass(frozen=True)
class BufferPlan:
    key: Hashable
    slots: tuple[Slot, ...]
    numel: int  # with the gaps that alignment leaves


def lay_out(items: list[Item], align: int = ALIGN) -> list[BufferPlan]:
    """One plan per key, in the order in which the keys first appear from the back."""
    by_key: dict[Hashable, list[Slot]] = {}
    for item in reversed(items):
        slots = by_key.setdefault(item.key, [])
        start = _round_up(slots[-1].stop, align) if slots else 0
        slots.append(Slot(item.name, start, start + item.numel))
    return [BufferPlan(key, tuple(slots), _round_up(slots[-1].stop, align)) for key, slots in by_key.items()]


def buckets(slots: tuple[Slot, ...], numel: int, bucket_numel: int | None) -> list[tuple[int, int, tuple[str, ...]]]:
    """The buffer cut between parameters into pieces of about `bucket_numel` elements: (start, stop, names).

    A bucket ends with the parameter that fills it, so it is at least `bucket_numel` long, but for the last. None: one bucket.
    """
    result: list[tuple[int, int, tuple[str, ...]]] = []
    start, names = 0, []
    for i, slot in enumerate(slots):
        names.append(slot.name)
        stop = slots[i + 1].start if i + 1 < len(slots) else numel
        if i + 1 == len(slots) or (bucket_numel is not None and stop - start >= bucket_numel):
            result.append((start, stop, tuple(names)))
            start, names = stop, []
    return result


def runs(slots: tuple[Slot, ...], label: dict[str, Hashable]) -> list[tuple[Hashable, int, int]]:
    """Neighbouring slots of equal label joined: (label, start, stop), the gaps between them included."""
    result: list[tuple[Hashable, int, int]] = []
    for slot in slots:
        if result and result[-1][0] == label[slot.name]:
            result[-1] = (result[-1][0], result[-1][1], slot.stop)
        else:
            result.append((label[slot.name], slot.start, slot.stop))
    return result


def _round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple
