"""What each rank holds of a tensor: tables by hand, and random tensors cut by `torch.chunk` as the oracle."""

import random
from itertools import product

import pytest
import torch

from megatron.core.parallel.rank_grid import Axis
from megatron.core.sharding.boxes import intersect, relative_to, size_of, slices, whole
from megatron.core.sharding.placement import Constant, Placement, is_counted, pieces


def axis(name: str, size: int, rank: int) -> Axis:
    return Axis(name, tuple(range(size)), rank)


def held(placement: Placement, local: tuple[int, ...], **at: tuple[int, int]) -> list:
    """The pieces of the rank at, say, tp=(rank, size)."""
    return pieces(placement, local, {name: axis(name, size, rank) for name, (rank, size) in at.items()})


# shape, shard, blocks, local shape, tp rank of tp size -> pairs of boxes (whole, local), "start:stop,..>start:stop,.."
TABLE = [
    # plain: the whole tensor on every rank
    ((4, 6), {}, (), (4, 6), (1, 2), "0:4,0:6>0:4,0:6"),
    ((5,), {}, (), (5,), (3, 4), "0:5>0:5"),
    # column-parallel: rows of the weight, and the bias
    ((4, 6), {"tp": 0}, (), (2, 6), (0, 2), "0:2,0:6>0:2,0:6"),
    ((4, 6), {"tp": 0}, (), (2, 6), (1, 2), "2:4,0:6>0:2,0:6"),
    ((8,), {"tp": 0}, (), (2,), (3, 4), "6:8>0:2"),
    # row-parallel: columns of the weight
    ((4, 6), {"tp": 1}, (), (4, 2), (2, 3), "0:4,4:6>0:4,0:2"),
    # gate|up: each half divided by itself
    ((8, 3), {"tp": 0}, (4, 4), (4, 3), (0, 2), "0:2,0:3>0:2,0:3 4:6,0:3>2:4,0:3"),
    ((8, 3), {"tp": 0}, (4, 4), (4, 3), (1, 2), "2:4,0:3>0:2,0:3 6:8,0:3>2:4,0:3"),
    ((8, 3), {"tp": 0}, (4, 4), (8, 3), (0, 1), "0:4,0:3>0:4,0:3 4:8,0:3>4:8,0:3"),
    # q|k|v of unequal width
    ((8,), {"tp": 0}, (4, 2, 2), (4,), (1, 2), "2:4>0:2 5:6>2:3 7:8>3:4"),
    # a vocabulary of 5 padded to 8: the last rank holds nothing but padding
    ((5, 3), {"tp": 0}, (), (2, 3), (0, 4), "0:2,0:3>0:2,0:3"),
    ((5, 3), {"tp": 0}, (), (2, 3), (1, 4), "2:4,0:3>0:2,0:3"),
    ((5, 3), {"tp": 0}, (), (2, 3), (2, 4), "4:5,0:3>0:1,0:3"),
    ((5, 3), {"tp": 0}, (), (2, 3), (3, 4), ""),
    ((5, 3), {"tp": 0}, (), (8, 3), (0, 1), "0:5,0:3>0:5,0:3"),
]


def parse(text: str) -> list:
    def box(words: str) -> tuple:
        return tuple(tuple(map(int, side.split(":"))) for side in words.split(","))

    return [tuple(map(box, pair.split(">"))) for pair in text.split()]


@pytest.mark.parametrize(("shape", "shard", "blocks", "local", "at", "expected"), TABLE)
def test_a_rank_holds_these_boxes(shape, shard, blocks, local, at, expected):
    placement = Placement(shape, Constant(0.0), shard=shard, blocks=blocks)
    assert held(placement, local, tp=at) == parse(expected)


def test_two_axes_cut_two_dimensions():
    placement = Placement((4, 6), None, shard={"tp": 0, "ep": 1})
    got = {(t, e): held(placement, (2, 2), tp=(t, 2), ep=(e, 3)) for t, e in product(range(2), range(3))}
    assert got[0, 0] == parse("0:2,0:2>0:2,0:2")
    assert got[1, 0] == parse("2:4,0:2>0:2,0:2")
    assert got[0, 2] == parse("0:2,4:6>0:2,0:2")
    assert got[1, 1] == parse("2:4,2:4>0:2,0:2")


def test_two_axes_may_cut_one_dimension():
    """The first axis of `shard` divides the whole, the second each of those parts."""
    placement = Placement((8,), None, shard={"ep": 0, "tp": 0})
    got = [held(placement, (2,), ep=(e, 2), tp=(t, 2)) for e, t in product(range(2), range(2))]
    assert got == [parse(f"{2 * i}:{2 * i + 2}>0:2") for i in range(4)]


def test_blocks_belong_to_the_dimension_that_they_fuse():
    """gate|up rows over tp while another axis divides the columns."""
    placement = Placement((8, 4), None, shard={"tp": 0, "ep": 1}, blocks=(4, 4))
    assert held(placement, (4, 2), tp=(1, 2), ep=(1, 2)) == parse("2:4,2:4>0:2,0:2 6:8,2:4>2:4,0:2")


def random_cases(count: int) -> list[tuple]:
    """(shape, padded shape, tp dimension or None, tp size, blocks, ep dimension or None, ep size)"""
    draw = random.Random(5)
    cases = []
    for _ in range(count):
        dims = draw.choice((1, 2, 3))
        t, e = draw.choice((1, 2, 3, 4)), draw.choice((1, 2, 3))
        padded = [draw.randint(1, 5) for _ in range(dims)]
        order = draw.sample(range(dims), dims)
        tp_dim = draw.choice((order[0], order[0], None))
        ep_dim = order[1] if dims > 1 and draw.random() < 0.4 else None
        blocks = ()
        if tp_dim is not None:
            if draw.random() < 0.4 and ep_dim is None:
                blocks = tuple(t * draw.randint(1, 3) for _ in range(draw.choice((1, 2, 3))))
                padded[tp_dim] = sum(blocks)
            else:
                padded[tp_dim] *= t
        if ep_dim is not None:
            padded[ep_dim] *= e
        shape = list(padded)
        if tp_dim is not None and not blocks and draw.random() < 0.5:
            shape[tp_dim] = draw.randint(1, padded[tp_dim])  # as a vocabulary that is padded
        cases.append((tuple(shape), tuple(padded), tp_dim, t, blocks, ep_dim, e))
    return cases


@pytest.mark.parametrize("first", range(0, 400, 100))
def test_all_ranks_together_hold_every_element_once(first: int):
    for shape, padded, tp_dim, t, blocks, ep_dim, e in random_cases(400)[first : first + 100]:
        shard = {name: dim for name, dim in (("tp", tp_dim), ("ep", ep_dim)) if dim is not None}
        placement = Placement(shape, None, shard=shard, blocks=blocks)
        tensor = torch.full(padded, -1)
        tensor[slices(whole(shape))] = torch.arange(torch.Size(shape).numel()).view(shape)
        seen = torch.zeros(shape, dtype=torch.int64)
        for i, j in product(range(t if tp_dim is not None else 1), range(e if ep_dim is not None else 1)):
            local = tensor
            if tp_dim is not None:
                parts = local.split(blocks or (local.shape[tp_dim],), dim=tp_dim)
                local = torch.cat([part.chunk(t, dim=tp_dim)[i] for part in parts], dim=tp_dim)
            if ep_dim is not None:
                local = local.chunk(e, dim=ep_dim)[j]
            rebuilt = torch.full_like(local, -1)
            for box, local_box in held(placement, tuple(local.shape), tp=(i, t), ep=(j, e)):
                assert size_of(box) == size_of(local_box)
                rebuilt[slices(local_box)] = tensor[slices(box)]
                seen[slices(box)] += 1
            assert torch.equal(rebuilt, local), (shape, shard, blocks)
        assert bool((seen == 1).all()), (shape, shard, blocks)


def test_blocks_that_do_not_fill_the_local_tensor_are_our_mistake():
    placement = Placement((8,), None, shard={"tp": 0}, blocks=(4, 2))
    with pytest.raises(AssertionError, match=r"\(4, 2\).*2.*4"):
        held(placement, (4,), tp=(0, 2))


@pytest.mark.parametrize(
    ("replicated_over", "speakers"),
    [
        ((), {(0, 0), (0, 1), (1, 0), (1, 1)}),
        (("tp",), {(0, 0), (0, 1)}),
        (("embd",), {(0, 0), (1, 0)}),
        (("tp", "embd"), {(0, 0)}),
    ],
)
def test_one_copy_speaks_for_a_parameter(replicated_over: tuple[str, ...], speakers: set):
    placement = Placement((2,), None, replicated_over=replicated_over)
    got = {
        (t, p)
        for t, p in product(range(2), range(2))
        if is_counted(placement, {"tp": axis("tp", 2, t), "embd": axis("embd", 2, p)})
    }
    assert got == speakers


def test_boxes_meet_and_move():
    assert intersect(((0, 4), (2, 6)), ((3, 9), (0, 3))) == ((3, 4), (2, 3))
    assert intersect(((0, 4),), ((4, 6),)) is None
    assert intersect((), ()) == (), "a scalar meets itself"
    assert relative_to(((3, 4), (2, 3)), ((1, 9), (2, 6))) == ((2, 3), (0, 1))
    assert size_of(((3, 4), (2, 6))) == (1, 4)
    assert whole((2, 3)) == ((0, 2), (0, 3))
    assert slices(((1, 2), (0, 3))) == (slice(1, 2), slice(0, 3))
    with pytest.raises(ValueError):
        intersect(((0, 1),), ((0, 1), (0, 1)))
