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

from collections import defaultdict
from enum import IntEnum, auto
from typing import NamedTuple

from megatron.core.parallel.stage_to_rank import StageMap


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
