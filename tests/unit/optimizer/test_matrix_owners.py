"""Owners of tensors: who finds which result, in which turn."""

from itertools import chain
from math import ceil

import pytest

from megatron.core.optimizer.matrix_owners import owners_by_turn

TABLE = [
    ((6, 5, 4, 3, 2), 2, (((0, 0), (1, 1)), ((3, 0), (2, 1)), ((4, 0),))),
    ((1, 9, 1), 2, (((1, 0), (0, 1)), ((2, 1),))),
    ((5, 5, 5, 5), 4, (((0, 0), (1, 1), (2, 2), (3, 3)),)),
    ((7,), 3, (((0, 0),),)),
    ((2, 3), 1, (((1, 0),), ((0, 0),))),
    ((), 2, ()),
]


@pytest.mark.parametrize(("work", "ranks", "expected"), TABLE, ids=str)
def test_turns_are_these(work: tuple[int, ...], ranks: int, expected: tuple):
    assert owners_by_turn(work, ranks) == expected


@pytest.mark.parametrize("ranks", [1, 2, 3, 5, 8, 64])
def test_every_tensor_has_one_owner_and_the_work_is_even(ranks: int):
    """A model of 12 layers: qkv, output, and two of the MLP, by the operations of their products."""
    h = 768
    work = tuple(r * r * (2 * c + r) for r, c in ((h, 3 * h), (h, h), (h, 4 * h), (h, 4 * h))) * 12
    turns = owners_by_turn(work, ranks)
    assert sorted(tensor for tensor, _ in chain(*turns)) == list(range(len(work)))
    assert all(len({rank for _, rank in turn}) == len(turn) for turn in turns), "one tensor a rank and turn"
    loads = [sum(work[tensor] for tensor, owner in chain(*turns) if owner == rank) for rank in range(ranks)]
    best = max(ceil(sum(work) / ranks), max(work))  # no division is better
    assert max(loads) <= 4 / 3 * best
