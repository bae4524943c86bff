"""The layout of parameters in contiguous buffers, and the shard of each rank. Pure integers.

    [ final norm | layer 1 fc2 |..] [ layer 1 qkv |..| layer 0 qkv |..] [..| embedding ]    one buffer per (reduce group,
    dtype)
      bucket 0                        bucket 1                            bucket 2          one collective per bucket
      shard 0 | shard 1 | shard 2     shard 0 | shard 1 | shard 2         ..                ZeRO: each bucket in equal shards

Parameters lie in reverse order of creation, the order in which a backward finishes their gradients. Each start is
aligned. A parameter lies in one bucket, so that a shard holds at most one run of its elements.

A parameter whose update needs the whole tensor lies in one shard: where it would cross a border of shards, it starts
at that border and leaves a gap.
"""

from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass

ALIGN = 8  # elements, 16 bytes in bfloat16: what matrix units ask of an operand; costs nothing in common shapes


@dataclass(frozen=True)
class Item:
    """A parameter to lay out."""

    name: str
    numel: int
    key: Hashable  # parameters of one key share a buffer
    unit: Hashable = None  # parameters of one unit are used together
    is_whole: bool = False  # lies in one shard


@dataclass(frozen=True)
class Slot:
    """Elements start .. stop of a buffer belong to this parameter."""

    name: str
    start: int
    stop: int


@dataclass(frozen=True)
class BucketPlan:
    """Elements start .. stop hold these parameters and are reduced or gathered by one collective."""

    start: int
    stop: int
    names: tuple[str, ...]


@dataclass(frozen=True)
class Cut:
    """How to cut a buffer: into buckets of about `bucket` elements (None: one bucket) or one bucket per unit, each into
    `shards` equal shards."""

    bucket: int | None = None
    shards: int = 1
    by_unit: bool = False


@dataclass(frozen=True)
class BufferPlan:
    key: Hashable
    slots: tuple[Slot, ...]
    buckets: tuple[BucketPlan, ...]
    shards: int

    @property
    def numel(self) -> int:
        """Elements, including the gaps that alignment leaves."""
        return self.buckets[-1].stop

    def owned(self, part: int, shards: int | None = None) -> list[tuple[int, int]]:
        """The runs (start, stop) of shard `part`, one per bucket; the whole buffer if there is one shard. shards: a
        smaller number of larger shards, each several of the plan's."""
        shards = self.shards if shards is None else shards
        if shards == 1:
            return [(0, self.numel)]
        parts = [(bucket.start, (bucket.stop - bucket.start) // shards) for bucket in self.buckets]
        return [(start + part * size, start + (part + 1) * size) for start, size in parts]


def lay_out(
    items: list[Item], align: int = ALIGN, cut_of: Callable[[Hashable], Cut] = lambda key: Cut()
) -> list[BufferPlan]:
    """One plan per key, in the order in which the keys first appear from the back.

    A bucket ends with the parameter that fills it. So every bucket but the last has at least the size asked for.
    """
    by_key: dict[Hashable, list[Item]] = {}
    for item in reversed(items):
        by_key.setdefault(item.key, []).append(item)
    return [_lay_out_buffer(key, held, align, cut_of(key)) for key, held in by_key.items()]


def _lay_out_buffer(key: Hashable, items: list[Item], align: int, cut: Cut) -> BufferPlan:
    slots: list[Slot] = []
    buckets: list[BucketPlan] = []
    start = 0
    for held in _in_buckets(items, align, cut):
        places, part = _place(held, align, cut.shards)
        slots += [Slot(item.name, start + at, start + at + item.numel) for item, at in zip(held, places)]
        buckets.append(BucketPlan(start, start + part * cut.shards, tuple(item.name for item in held)))
        start = buckets[-1].stop
    return BufferPlan(key, tuple(slots), tuple(buckets), cut.shards)


def _in_buckets(items: list[Item], align: int, cut: Cut) -> Iterator[list[Item]]:
    held, size = [], 0
    for item, following in zip(items, [*items[1:], None]):
        held.append(item)
        size += _round_up(item.numel, align)
        is_full = cut.bucket is not None and size >= cut.bucket
        if following is None or (following.unit != item.unit if cut.by_unit else is_full):
            yield held
            held, size = [], 0


def _place(items: list[Item], align: int, shards: int) -> tuple[list[int], int]:
    """(start of each item of a bucket, length of a shard). The shard grows by the overflow until all items fit."""
    part = _round_up(sum(_round_up(item.numel, align) for item in items), align * shards) // shards
    part = max([part, *(_round_up(item.numel, align) for item in items if item.is_whole)])  # a whole item fits a shard
    while True:
        places, at = [], 0
        for item in items:
            if item.is_whole and at % part + item.numel > part:  # would cross a border of shards
                at = _round_up(at, part)
            places.append(at)
            at += _round_up(item.numel, align)
        if at <= part * shards:
            return places, part
        part += _round_up(at - part * shards, align * shards) // shards


def overlaps(held: list[tuple[int, int]], start: int, stop: int) -> list[tuple[int, int]]:
    """The intersections of elements start .. stop with these runs, without empty ones."""
    shared = [(max(start, a), min(stop, b)) for a, b in held]
    return [(a, b) for a, b in shared if a < b]


def runs(slots: tuple[Slot, ...], label: dict[str, Hashable]) -> list[tuple[Hashable, int, int]]:
    """Neighbouring slots of equal label, joined: (label, start, stop), including the gaps between them."""
    result: list[tuple[Hashable, int, int]] = []
    for slot in slots:
        if result and result[-1][0] == label[slot.name]:
            result[-1] = (result[-1][0], result[-1][1], slot.stop)
        else:
            result.append((label[slot.name], slot.start, slot.stop))
    return result


def _round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple
