"""Where parameters lie in their buffers: tables, and what must hold for any of them."""

import itertools
import random
from dataclasses import replace

import pytest

from megatron.core.distributed.buffer_plan import ALIGN, BucketSpec, ParamRange, ParamSpec, overlaps, plan_buffers, runs

# parameters in order of creation "name:numel[:key]", alignment -> per key "key total | name start stop | ..."
TABLE = [
    ("", 8, []),
    ("a:8", 8, ["- 8 | a 0 8"]),
    ("a:5", 8, ["- 8 | a 0 5"]),
    ("a:5 b:8 c:1", 1, ["- 14 | c 0 1 | b 1 9 | a 9 14"]),
    ("a:5 b:8 c:1", 8, ["- 24 | c 0 1 | b 8 16 | a 16 21"]),
    ("a:9 b:17", 8, ["- 40 | b 0 17 | a 24 33"]),
    ("a:3:x b:4:y c:5:x", 4, ["x 12 | c 0 5 | a 8 11", "y 4 | b 0 4"]),
    ("a:1:x b:1:y c:1:z", 2, ["z 2 | c 0 1", "y 2 | b 0 1", "x 2 | a 0 1"]),
    ("a:0 b:3", 8, ["- 8 | b 0 3 | a 8 8"]),
]


@pytest.mark.parametrize(("parameters", "align", "expected"), TABLE)
def test_parameters_lie_in_reverse_order_of_creation(parameters: str, align: int, expected: list[str]):
    items = [
        ParamSpec(n, int(size), key or "-") for n, size, key in ((w + ":").split(":")[:3] for w in parameters.split())
    ]
    got = plan_buffers(items, align)
    drawn = [
        " | ".join([f"{plan.key} {plan.numel}", *(f"{s.name} {s.start} {s.stop}" for s in plan.param_ranges)])
        for plan in got
    ]
    assert drawn == expected


def test_the_alignment_is_eight_elements():
    assert ALIGN == 8
    (plan,) = plan_buffers([ParamSpec("a", 1, 0), ParamSpec("b", 1, 0)])
    assert plan.param_ranges == (ParamRange("b", 0, 1), ParamRange("a", 8, 9))
    assert plan.numel == 16


def test_every_element_has_one_place():
    draw = random.Random(3)
    for _ in range(100):
        align = draw.choice((1, 2, 8, 64))
        items = [ParamSpec(str(i), draw.randint(1, 100), draw.choice("xyz")) for i in range(draw.randint(1, 12))]
        plans = plan_buffers(items, align)
        assert sorted(slot.name for plan in plans for slot in plan.param_ranges) == sorted(item.name for item in items)
        assert len({plan.key for plan in plans}) == len(plans)
        sizes = {item.name: (item.numel, item.key) for item in items}
        for plan in plans:
            end = 0
            for slot in plan.param_ranges:
                assert slot.start % align == 0
                assert end <= slot.start < end + align, "no overlap, and no gap beyond the alignment"
                assert (slot.stop - slot.start, plan.key) == sizes[slot.name]
                end = slot.stop
            assert end <= plan.numel < end + align
            assert plan.numel % align == 0


# labels of slots a 0:5, b 8:16, c 16:17, d 24:32 -> (label, start, stop)
RUNS = [
    ("1111", [("1", 0, 32)]),
    ("1112", [("1", 0, 17), ("2", 24, 32)]),
    ("1122", [("1", 0, 16), ("2", 16, 32)]),
    ("1212", [("1", 0, 5), ("2", 8, 16), ("1", 16, 17), ("2", 24, 32)]),
    ("2111", [("2", 0, 5), ("1", 8, 32)]),
]


@pytest.mark.parametrize(("labels", "expected"), RUNS)
def test_neighbours_of_equal_label_are_one_run(labels: str, expected: list):
    slots = (ParamRange("a", 0, 5), ParamRange("b", 8, 16), ParamRange("c", 16, 17), ParamRange("d", 24, 32))
    assert runs(slots, dict(zip("abcd", labels))) == expected


def test_no_slots_give_no_runs():
    assert runs((), {}) == []


# parameters in order of creation, bucket, shards -> buckets "start stop names", what shard 1 owns
CUTS = [
    ("a:5 b:8 c:1", None, 1, ["0 24 cba"], [(0, 24)]),
    ("a:5 b:8 c:1", 8, 1, ["0 8 c", "8 16 b", "16 24 a"], [(0, 24)]),
    ("a:5 b:8 c:1", None, 2, ["0 32 cba"], [(16, 32)]),  # 24 rounded up to a multiple of 2 x 8
    ("a:5 b:8 c:1", 9, 2, ["0 16 cb", "16 32 a"], [(8, 16), (24, 32)]),
    ("a:40 b:8 c:1", 8, 3, ["0 24 c", "24 48 b", "48 96 a"], [(8, 16), (32, 40), (64, 80)]),
]


@pytest.mark.parametrize(("parameters", "bucket", "shards", "buckets", "owned"), CUTS)
def test_buckets_are_cut_into_equal_aligned_parts(parameters, bucket, shards, buckets, owned):
    items = [ParamSpec(name, int(size), 0) for name, size in (word.split(":") for word in parameters.split())]
    (plan,) = plan_buffers(items, bucket_spec_of=lambda key: BucketSpec(bucket, shards))
    assert [f"{b.start} {b.stop} {''.join(b.names)}" for b in plan.buckets] == buckets
    assert plan.shard_runs(1 if shards > 1 else 0) == owned
    everyone = sorted(run for part in range(shards) for run in plan.shard_runs(part))
    assert [element for start, stop in everyone for element in range(start, stop)] == list(range(plan.numel))
    assert all(
        sum(a <= s.start and s.stop <= b for a, b in [(k.start, k.stop) for k in plan.buckets]) == 1
        for s in plan.param_ranges
    )


def test_what_runs_share_with_a_range():
    assert overlaps([(0, 4), (8, 12)], 2, 10) == [(2, 4), (8, 10)]
    assert overlaps([(0, 4), (8, 12)], 4, 8) == []


@pytest.mark.parametrize("shards", [1, 2, 3, 4])
def test_what_is_updated_whole_lies_in_one_shard_and_the_rest_end_to_end(shards: int):
    items = [
        ParamSpec(f"p{i}", size, 0, is_unsplit=i % 3 == 0)
        for i, size in enumerate([50, 7, 64, 33, 100, 9, 120, 8, 40, 1])
    ]
    for bucket in (None, 128):
        (plan,) = plan_buffers(items, bucket_spec_of=lambda _, bucket=bucket: BucketSpec(bucket, shards))
        slots = {slot.name: slot for slot in plan.param_ranges}
        ends = [(slot.start, slot.stop) for slot in plan.param_ranges]
        assert ends == sorted(ends) and all(a[1] <= b[0] for a, b in itertools.pairwise(ends))
        parts = [part for shard in range(shards) for part in plan.shard_runs(shard)]
        for item in items:
            held = overlaps(parts, slots[item.name].start, slots[item.name].stop)
            assert sum(stop - start for start, stop in held) == item.numel
            assert len(held) == 1 or not item.is_unsplit
        assert plan.numel % (ALIGN * shards) == 0
        assert shards > 1 or plan.numel == plan_buffers([replace(x, is_unsplit=False) for x in items])[0].numel
