"""GPipe, 1F1B, interleaved 1F1B and the zero-bubble schedule ZB-H1, and the forwards of an evaluation.

    p  pipeline ranks       m  microbatches in a step       v  chunks: stages per rank

Each function returns the lists of actions of all ranks, in the order in which `actions.py` draws them.
"""

from collections import deque
from collections.abc import Callable, Iterable

from megatron.core.parallel.stage_to_rank import StageMap, loop
from megatron.core.pipeline_parallel.schedule.actions import Action, Op, Schedule, check_positive_sizes


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


def interleaved(p: int, m: int, v: int, group: int | None = None) -> Schedule:
    """Interleaved 1F1B over v chunks per rank (arXiv:2104.04473, section 2.2.2).

    1/v of the bubble for v times the transfers. The first backward reaches `rank` after microbatch 0 has passed all
    chunks, (v - 1) * group forwards, and has gone to the last rank and back, 2 * (p - rank - 1) steps. The warm-up fills
    that time with forwards, where 1F1B waits: so v = 1 has more microbatches in flight than `one_f_one_b` for the same
    bubble.

    group: the microbatches that pass a chunk before the rank turns to its next one, p to m; default p. m must be a
    multiple of it, or leave a last group of at least p. Larger groups have more microbatches in flight; with group m
    every m from p is possible. (Megatron: microbatch_group_size_per_vp_stage)
    """
    group = _checked_group("interleaved", p, m, v, group, instead="1f1b")
    return _alternate(p, m, v, warmup=lambda rank: 2 * (p - rank - 1) + (v - 1) * group, group=group)


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


def zb_interleaved(p: int, m: int, v: int, group: int | None = None) -> Schedule:
    """Interleaved 1F1B whose weight gradients fill the bubble as in ZB-H1: 1/v of ZB-H1's bubble.

    It takes the memory of the interleaved schedule, and its `group`. Rank r has 2r microbatches less in flight than
    rank 0, so it can defer r of its W.
    """
    group = _checked_group("zb-interleaved", p, m, v, group, instead="zb-v or zb-h1")
    return split_and_defer_weight_grads(interleaved(p, m, v, group), delay=lambda rank: rank)


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


def _alternate(p: int, m: int, v: int, warmup: Callable[[int], int], group: int | None = None) -> Schedule:
    """Return, for each rank, `warmup(rank)` forwards, then one forward and one backward in turn, then the rest.

    group: the microbatches that pass a chunk before the next one's turn; default p.
    """
    schedule = []
    for rank in range(p):
        stages = loop(p, v).of_rank(rank)
        forwards = _in_groups(Op.F, stages, group=group or p, m=m)
        backwards = _in_groups(Op.B, reversed(stages), group=group or p, m=m)
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


def _checked_group(name: str, p: int, m: int, v: int, group: int | None, *, instead: str) -> int:
    """Return the size of the groups in which microbatches pass a rank's chunks.

    Raises ValueError if it does not fit: a group below p would wait for its own microbatches in the next chunk.
    """
    check_positive_sizes(name, p, m, v)
    flag = "--microbatch-group-size-per-virtual-pipeline-stage"
    if group is None:
        if m % p:
            or_groups = f"give {flag} {m}, " if m > p else ""
            raise ValueError(
                f"{name}: num_microbatches ({m}) must be a multiple of the pipeline size ({p}); {or_groups}use {instead}, "
                "or change --global-batch-size"
            )
        return p
    if not p <= group <= m:
        raise ValueError(
            f"{name}: {flag} ({group}) must be at least the pipeline size ({p}) and at most num_microbatches ({m}); "
            "change it or --global-batch-size"
        )
    if 0 < m % group < p:
        raise ValueError(
            f"{name}: {flag} ({group}) leaves a last group of {m % group} of num_microbatches ({m}); it must be empty or "
            f"at least the pipeline size ({p}): give {m}, or change --global-batch-size"
        )
    return group
