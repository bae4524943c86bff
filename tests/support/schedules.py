"""Pipeline schedules over a grid of sizes, and the short forms in which their tests are written."""

import functools
import re

import pytest

from megatron.core.pipeline_parallel.schedule.actions import Action, Op, Schedule
from megatron.core.pipeline_parallel.schedule.gpipe_1f1b_zb_h1 import (
    forward_only,
    gpipe,
    interleaved,
    one_f_one_b,
    zb_h1,
    zb_interleaved,
)
from megatron.core.pipeline_parallel.schedule.lower import add_reduce, add_transfers
from megatron.core.pipeline_parallel.schedule.registry import default_chunks
from megatron.core.pipeline_parallel.schedule.zb_v import zb_v

RANKS, MICROBATCHES, CHUNKS = range(1, 9), (*range(1, 13), 16), range(1, 5)
FLAT = [(p, m) for p in RANKS for m in MICROBATCHES]
CHUNKED = [(p, m, v) for p, m in FLAT if m % p == 0 for v in CHUNKS]


def costs(forward, input_grad, weight_grad):
    """A cost model in which splitting a backward is free."""
    return {Op.F: forward, Op.B: input_grad + weight_grad, Op.I: input_grad, Op.W: weight_grad}


COSTS = [costs(1, 1, 1), costs(1, 2, 1), costs(3, 4, 2), costs(2, 1, 3), costs(0.1, 0.1, 0.2)]
COVERING = [
    (2, 2, 2),
    (2, 8, 3),
    (4, 8, 2),
    (8, 8, 1),
    (3, 9, 4),
    (5, 3, 2),
    (7, 32, 1),
]  # p, m, v of a thinned product


def schedules_of(p, m, v) -> list[Schedule]:
    """Every schedule that exists for these sizes: those that train, split and unsplit, and that of evaluation."""
    made = [gpipe(p, m), one_f_one_b(p, m), zb_h1(p, m)] if v == 1 else []
    if m % p == 0:
        made += [interleaved(p, m, v), zb_interleaved(p, m, v)]
    if v == 2 and m in MICROBATCHES:  # test_zero_bubble_v.py has the other m
        made.append(zb_v(p, m))
    return [*made, forward_only(p, m, v)]


def sizes_of(name: str) -> list[tuple[int, int, int]]:
    """The sizes of the grid, p, m, v, for which a schedule of the product exists."""
    if name.endswith("interleaved"):
        return CHUNKED
    return [(p, m, default_chunks(name)) for p, m in FLAT]


def trains(schedule: Schedule) -> bool:
    return any(action.op is not Op.F for actions in schedule for action in actions)


@functools.cache
def training_schedules() -> list[tuple[int, int, int, Schedule]]:
    """(p, m, v, schedule) for every schedule that trains, over the grid."""
    grid = [(p, m, v) for p, m in FLAT for v in CHUNKS]
    return [(p, m, v, schedule) for p, m, v in grid for schedule in schedules_of(p, m, v) if trains(schedule)]


@functools.cache
def lowered_schedules() -> list[tuple[int, int, int, Schedule]]:
    """The same with transfers and reductions; made once, since several tests read them."""
    return [(p, m, v, lower(schedule, p)) for p, m, v, schedule in training_schedules()]


def lower(schedule: Schedule, p: int) -> Schedule:
    return add_reduce(add_transfers(schedule))


def parse(text: str) -> Schedule:
    """One rank per line: "F0.0 SEND_F0.0" -> [[F0.0, SEND_F0.0]]."""
    rows = []
    for line in text.strip().splitlines():
        words = [re.fullmatch(r"([A-Z_]+)(\d+)(?:\.(\d+))?", word).groups() for word in line.split()]
        rows.append([Action(Op[op], int(stage), None if i is None else int(i)) for op, stage, i in words])
    return rows


def assert_lists(schedule: Schedule, table: str) -> None:
    assert [" ".join(map(str, row)) for row in schedule] == [
        " ".join(line.split()) for line in table.strip().splitlines()
    ]


def refusal(function, *args, **kwargs) -> str:
    """What the ValueError of the call says."""
    with pytest.raises(ValueError) as error:
        function(*args, **kwargs)
    return str(error.value)
