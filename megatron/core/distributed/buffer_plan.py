"""The layout of parameters in contiguous buffers, and the shard of each rank. Pure integers.

    one buffer per (reduce group, dtype):
    [ final norm | layer 1 fc2 |..] [ layer 1 qkv |..| layer 0 qkv |..] [..| embedding ]
      bucket 0                        bucket 1                            bucket 2          one collective per bucket
      shard 0 | shard 1 | shard 2     shard 0 | shard 1 | shard 2         ..                ZeRO: equal shards of each

Parameters are laid out in reverse order of creation, the order in which a backward finishes their gradients. Each start
is aligned. A parameter is in one bucket, so a shard holds at most one contiguous range of its elements.

A parameter whose update needs the whole tensor is not split: where it would cross a border between shards, it starts at
that border and leaves a gap.
"""

from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass

ALIGN = 8  # elements, 16 bytes in bfloat16: what matrix units ask of an operand; costs nothing in common shapes


@dataclass(frozen=True)
class ParamSpec:
    """A parameter to lay out."""

    name: str
    numel: int
    key: Hashable  # parameters of one key share a buffer
    unit: Hashable = None  # parameters of one unit are used together
    is_unsplit: bool = False  # must be in one shard


@dataclass(frozen=True)
class ParamRange:
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
class BucketSpec:
    """The rule by which a buffer is cut: into buckets of about `bucket_numel` elements (None: one bucket) or, with
    `by_unit`, one bucket per unit. Each bucket is cut into `shards` equal shards."""

    bucket_numel: int | None = None
    shards: int = 1
    by_unit: bool = False


@dataclass(frozen=True)
class BufferPlan:
    """The layout of one buffer: the range of each parameter, and the buckets, in the order of the buffer."""

    key: Hashable
    param_ranges: tuple[ParamRange, ...]
    buckets: tuple[BucketPlan, ...]
    shards: int

    @property
    def numel(self) -> int:
        """Elements, including the gaps that alignment leaves."""
        return self.buckets[-1].stop

    def shard_runs(self, rank: int, shards: int | None = None) -> list[tuple[int, int]]:
        """Return the ranges (start, stop) of shard `rank`, one per bucket; the whole buffer if there is one shard.

        shards: a smaller number of larger shards, each several of the plan's; default: the plan's number.
        """
        shards = self.shards if shards is None else shards
        if shards == 1:
            return [(0, self.numel)]
        result = []
        for bucket in self.buckets:
            size = (bucket.stop - bucket.start) // shards
            start = bucket.start + rank * size
            result.append((start, start + size))
        return result


def plan_buffers(
    params: list[ParamSpec],
    align: int = ALIGN,
    bucket_spec_of: Callable[[Hashable], BucketSpec] = lambda key: BucketSpec(),
) -> list[BufferPlan]:
    """Return one plan per key, in the order in which the keys first appear from the back.

    A bucket ends with the parameter that fills it. So every bucket but the last has at least the size asked for.
    """
    by_key: dict[Hashable, list[ParamSpec]] = {}
    for param in reversed(params):
        by_key.setdefault(param.key, []).append(param)
    return [_plan_buffer(key, same_key, align, bucket_spec_of(key)) for key, same_key in by_key.items()]


def _plan_buffer(key: Hashable, params: list[ParamSpec], align: int, spec: BucketSpec) -> BufferPlan:
    ranges: list[ParamRange] = []
    buckets: list[BucketPlan] = []
    bucket_start = 0
    for bucket_params in _split_into_buckets(params, align, spec):
        offsets, shard_numel = _place(bucket_params, align, spec.shards)
        for param, offset in zip(bucket_params, offsets):
            start = bucket_start + offset
            ranges.append(ParamRange(param.name, start, start + param.numel))
        bucket_stop = bucket_start + shard_numel * spec.shards
        buckets.append(BucketPlan(bucket_start, bucket_stop, tuple(param.name for param in bucket_params)))
        bucket_start = bucket_stop
    return BufferPlan(key, tuple(ranges), tuple(buckets), spec.shards)


def _split_into_buckets(params: list[ParamSpec], align: int, spec: BucketSpec) -> Iterator[list[ParamSpec]]:
    """Yield the parameters of each bucket, in order."""
    bucket: list[ParamSpec] = []
    numel = 0
    for param, following in zip(params, [*params[1:], None]):
        bucket.append(param)
        numel += _round_up(param.numel, align)
        if following is None:
            ends = True
        elif spec.by_unit:
            ends = following.unit != param.unit
        else:
            ends = spec.bucket_numel is not None and numel >= spec.bucket_numel
        if ends:
            yield bucket
            bucket = []
            numel = 0


def _place(params: list[ParamSpec], align: int, shards: int) -> tuple[list[int], int]:
    """Return (start of each parameter of a bucket, elements of a shard). The shard grows until all parameters fit."""
    total = sum(_round_up(param.numel, align) for param in params)
    shard_numel = _round_up(total, align * shards) // shards
    # an unsplit parameter must fit into one shard
    shard_numel = max([shard_numel, *(_round_up(param.numel, align) for param in params if param.is_unsplit)])
    while True:
        starts = []
        end = 0
        for param in params:
            crosses_border = end % shard_numel + param.numel > shard_numel
            if param.is_unsplit and crosses_border:
                end = _round_up(end, shard_numel)
            starts.append(end)
            end += _round_up(param.numel, align)
        if end <= shard_numel * shards:
            return starts, shard_numel
        shard_numel += _round_up(end - shard_numel * shards, align * shards) // shards


def overlaps(ranges: list[tuple[int, int]], start: int, stop: int) -> list[tuple[int, int]]:
    """Return the intersections of elements start .. stop with these ranges, without empty ones."""
    shared = [(max(start, first), min(stop, last)) for first, last in ranges]
    return [(first, last) for first, last in shared if first < last]


def runs(param_ranges: tuple[ParamRange, ...], label: dict[str, Hashable]) -> list[tuple[Hashable, int, int]]:
    """Join neighbouring parameters of equal label: (label, start, stop), including the gaps between them."""
    result: list[tuple[Hashable, int, int]] = []
    for param_range in param_ranges:
        this_label = label[param_range.name]
        if result and result[-1][0] == this_label:
            _, start, _ = result.pop()
            result.append((this_label, start, param_range.stop))
        else:
            result.append((this_label, param_range.start, param_range.stop))
    return result


def _round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple
