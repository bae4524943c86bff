"""Pipeline schedules as data: one list of actions per pipeline rank, made by pure functions of integers.

    p  pipeline ranks       m  microbatches in a step       v  chunks: stages per rank

1F1B with p = 3, m = 4, a backward taking twice the time of a forward (drawn by `plot.plot_text`):

    rank 0 |F0F1F2        B0--F3B1--  B2--  B3--|
    rank 1 |  F0F1    B0--F2B1--F3B2--  B3--    |
    rank 2 |    F0B0--F1B1--F2B2--F3B3--        |

A schedule is the order of compute on each rank, and the stage map: a stage is on the rank whose list has its actions.
`simulate` computes its times, `lower` adds communication, the executor runs one rank's list. A new schedule is a
function, in a file here or in a script, and a line in `registry.SCHEDULES`.
"""

from collections import defaultdict, deque
from collections.abc import Callable, Iterable
from enum import IntEnum, auto
from typing import NamedTuple

from megatron.core.parallel.stage_to_rank import StageMap, loop


class Op(IntEnum):
    """The kinds of action. A transfer is two actions at each end: start it, and wait for it."""

    F = auto()  # forward of one microbatch through one stage
    B = auto()  # its backward: input and weight gradients
    I = auto()  # half of B: the input gradient, which the previous stage needs  # noqa: E741
    W = auto()  # the other half: the weight gradients, not needed before the end of the step
    SEND_F = auto()  # start to send the output of F3.1: SEND_F3.1 meets POST_F4.1
    SENT_F = auto()  # wait until it is sent: its memory may be reused
    POST_F = auto()  # start to receive the input of F4.1
    RECV_F = auto()  # wait until it has arrived
    SEND_B = auto()  # start to send the input gradient of B4.1 or I4.1: SEND_B4.1 meets POST_B3.1
    SENT_B = auto()  # wait until it is sent
    POST_B = auto()  # start to receive the output gradient of B3.1 or I3.1
    RECV_B = auto()  # wait until it has arrived
    REDUCE = auto()  # start to reduce the stage's gradients over data-parallel ranks; has no microbatch


COMPUTE = frozenset({Op.F, Op.B, Op.I, Op.W})  # the ops of a schedule before `lower`


class Action(NamedTuple):
    """One entry of a rank's list: F3.1 is the forward of microbatch 1 through stage 3."""

    op: Op
    stage: int
    microbatch: int | None = None

    def with_op(self, op: Op) -> "Action":
        """Return another action of the same stage and microbatch."""
        return Action(op, self.stage, self.microbatch)

    def __repr__(self):
        microbatch = "" if self.microbatch is None else f".{self.microbatch}"
        return f"{self.op.name}{self.stage}{microbatch}"


Schedule = list[list[Action]]  # [rank][position]


def gpipe(p: int, m: int, v: int = 1) -> Schedule:
    """GPipe: all forwards, then all backwards; m microbatches in flight on every rank (arXiv:1811.06965)."""
    check_positive_sizes("gpipe", p, m, v, chunks=1)
    return _alternate(p, m, 1, warmup=lambda rank: m)


def one_f_one_b(p: int, m: int, v: int = 1) -> Schedule:
    """1F1B: one forward, one backward in turn, after a warm-up (PipeDream-Flush, arXiv:2104.04473, section 2.2.1).

    The bubble of GPipe, but min(p - rank, m) microbatches in flight. The default.
    """
    check_positive_sizes("1f1b", p, m, v, chunks=1)
    return _alternate(p, m, 1, warmup=lambda rank: p - rank - 1)


def interleaved(p: int, m: int, v: int) -> Schedule:
    """Interleaved 1F1B over v chunks per rank (arXiv:2104.04473, section 2.2.2).

    1/v of the bubble for v times the transfers. m must be a multiple of p. The first backward reaches `rank` after
    microbatch 0 has passed all chunks, (v - 1) * p forwards, and has gone to the last rank and back, 2 * (p - rank - 1)
    steps. The warm-up fills that time with forwards, where 1F1B waits: so v = 1 has more microbatches in flight than
    `one_f_one_b` for the same bubble.
    """
    _check_groups("interleaved", p, m, v, instead="1f1b")
    return _alternate(p, m, v, warmup=lambda rank: 2 * (p - rank - 1) + (v - 1) * p)


def zb_h1(p: int, m: int, v: int = 1) -> Schedule:
    """ZB-H1: 1F1B whose weight gradients fill the bubble, with the memory of 1F1B (arXiv:2401.10241, section 2.2).

    In 1F1B rank r has p - r microbatches in flight; a low rank idles most at the end of the step, a high rank at its
    start. With memory for p microbatches, as rank 0 has, rank r can defer r of its W: the I come r * tW earlier, and W
    fill the end. With p = 3, m = 4 and F, I, W of equal time:

        rank 0 |F0F1F2    I0W0F3I1W1I2W2I3W3|
        rank 1 |  F0F1  I0F2I1W0F3I2W1I3W2W3|
        rank 2 |    F0I0F1I1F2I2W0F3I3W1W2W3|
    """
    check_positive_sizes("zb-h1", p, m, v, chunks=1)
    return split_and_defer_weight_grads(one_f_one_b(p, m), delay=lambda rank: rank)


def zb_interleaved(p: int, m: int, v: int) -> Schedule:
    """Interleaved 1F1B whose weight gradients fill the bubble as in ZB-H1: 1/v of ZB-H1's bubble.

    It takes the memory of the interleaved schedule. m must be a multiple of p. Rank r has 2r microbatches less in
    flight than rank 0, so it can defer r of its W.
    """
    _check_groups("zb-interleaved", p, m, v, instead="zb-v or zb-h1")
    return split_and_defer_weight_grads(interleaved(p, m, v), delay=lambda rank: rank)


def split_and_defer_weight_grads(schedule: Schedule, delay: Callable[[int], int]) -> Schedule:
    """Return the schedule with each B split into I and W: a W follows the I of `delay(rank)` backwards later.

    With delay 1 on this rank:   F0 B0 F1 B1 B2   ->   F0 I0 F1 I1 W0 I2 W1 W2

    W run in the order of their I, so a stage's gradients are summed in the order of its microbatches, as by B.
    """
    split = []
    for rank, actions in enumerate(schedule):
        row: list[Action] = []
        waiting: deque[Action] = deque()  # W whose I has run
        for action in actions:
            if action.op is not Op.B:
                row.append(action)
                continue
            row.append(action.with_op(Op.I))
            waiting.append(action.with_op(Op.W))
            if len(waiting) > delay(rank):
                row.append(waiting.popleft())
        split.append(row + list(waiting))
    return split


def forward_only(p: int, m: int, v: int = 1) -> Schedule:
    """Return the forwards of `interleaved`, or of 1F1B with v = 1, for evaluation; m need not be a multiple of p."""
    check_positive_sizes("forward_only", p, m, v)
    return forwards_over(loop(p, v), m)


def forwards_over(stages: StageMap, m: int) -> Schedule:
    """Return the forwards of m microbatches, for any stage map."""
    ranks = range(len(set(stages.ranks)))
    return [_in_groups(Op.F, stages.of_rank(rank), group=len(ranks), m=m) for rank in ranks]


def dependencies(action: Action, num_stages: int) -> list[Action]:
    """Return the compute actions, on any rank, whose results a compute action needs.

    B needs the B of the next stage, I needs its I: the backward of a microbatch is split on every stage or on none.
    """
    assert action.op in COMPUTE, f"{action} is not a compute action"
    if action.op is Op.F:
        return [action._replace(stage=action.stage - 1)] if action.stage > 0 else []
    if action.op is Op.W:
        return [action.with_op(Op.I)]
    forward = action.with_op(Op.F)
    if action.stage == num_stages - 1:
        return [forward]  # the loss starts the backward
    return [forward, action._replace(stage=action.stage + 1)]


def count_stages(schedule: Schedule) -> int:
    return 1 + max(action.stage for actions in schedule for action in actions)


def stages_in(schedule: Schedule) -> StageMap:
    """Return the stage map of a schedule. ValueError if a stage is on no rank or on several."""
    ranks_of_stage: dict[int, set[int]] = defaultdict(set)
    for rank, actions in enumerate(schedule):
        for action in actions:
            ranks_of_stage[action.stage].add(rank)
    problems = []
    for stage in range(count_stages(schedule)):
        if len(ranks_of_stage[stage]) != 1:
            problems.append(f"stage {stage} is on ranks {sorted(ranks_of_stage[stage])}")
    if problems:
        raise ValueError(f"schedule: {'; '.join(problems)}; all actions of a stage must be on one rank")
    return StageMap(tuple(ranks_of_stage[stage].pop() for stage in range(len(ranks_of_stage))))


def _alternate(p: int, m: int, v: int, warmup: Callable[[int], int]) -> Schedule:
    """Return, for each rank, `warmup(rank)` forwards, then one forward and one backward in turn, then the rest."""
    schedule = []
    for rank in range(p):
        stages = loop(p, v).of_rank(rank)
        forwards = _in_groups(Op.F, stages, group=p, m=m)
        backwards = _in_groups(Op.B, reversed(stages), group=p, m=m)
        num_warmup = min(warmup(rank), len(forwards))
        actions = forwards[:num_warmup]
        for forward, backward in zip(forwards[num_warmup:], backwards):
            actions += [forward, backward]
        schedule.append(actions + backwards[len(forwards) - num_warmup :])
    return schedule


def _in_groups(op: Op, stages: Iterable[int], *, group: int, m: int) -> list[Action]:
    """Return the actions of `group` microbatches through each of `stages` in turn, then those of the next group.

    With stages 0 and 2, groups of 2 and m = 4:   F0.0 F0.1 F2.0 F2.1   F0.2 F0.3 F2.2 F2.3
    """
    stages = list(stages)
    return [
        Action(op, stage, microbatch)
        for first in range(0, m, group)
        for stage in stages
        for microbatch in range(first, min(first + group, m))
    ]


def check_positive_sizes(name: str, p: int, m: int, v: int, *, chunks: int | None = None) -> None:
    """Raise ValueError for sizes below 1, and for other than `chunks` chunks per rank."""
    problems = []
    if p < 1:
        problems.append(f"the pipeline size ({p}) must be at least 1; change --pipeline-model-parallel-size")
    if m < 1:
        problems.append(f"num_microbatches ({m}) must be at least 1; raise --global-batch-size")
    if v < 1:
        problems.append(
            f"chunks per rank ({v}) must be at least 1; lower --num-layers-per-virtual-pipeline-stage to at most "
            "num_layers / pipeline size"
        )
    if not problems and chunks not in (None, v):
        required = "one chunk" if chunks == 1 else f"{chunks} chunks"
        problems.append(
            f"it has {required} per rank, not {v}; use interleaved, or leave out --num-layers-per-virtual-pipeline-stage and "
            "--num-virtual-stages-per-pipeline-rank"
        )
    if problems:
        raise ValueError("\n".join(f"{name}: {problem}" for problem in problems))


def _check_groups(name: str, p: int, m: int, v: int, *, instead: str) -> None:
    """Raise ValueError unless the microbatches can pass a rank's chunks in groups of p."""
    check_positive_sizes(name, p, m, v)
    if m % p:
        raise ValueError(
            f"{name}: num_microbatches ({m}) must be a multiple of the pipeline size ({p}); use {instead}, or change "
            "--global-batch-size"
        )
