"""Training schedules are registered by name, and checked when they are made.

A name alone gives the stage map and the number of chunks per rank. `SCHEDULES` maps a name to a function (p, m, v) ->
Schedule, which raises ValueError if the sizes do not fit; some take `group` as a fourth. Scripts may add entries. The
stage map is read from the lists for m = 2 p, before the number of microbatches is known, so it must be equal for all m.
A schedule for one number of chunks per rank only has that number as the default of its v.
"""

import inspect
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from itertools import product
from typing import Any

from megatron.core.base.registry_with_checked_entries import Registry
from megatron.core.parallel.stage_to_rank import StageMap
from megatron.core.pipeline_parallel.schedule.actions import Action, Op, Schedule, stages_in
from megatron.core.pipeline_parallel.schedule.gpipe_1f1b_zb_h1 import (
    gpipe,
    interleaved,
    one_f_one_b,
    zb_h1,
    zb_interleaved,
)
from megatron.core.pipeline_parallel.schedule.zb_v import zb_v

_OURS = {
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "interleaved": interleaved,
    "zb-h1": zb_h1,
    "zb-interleaved": zb_interleaved,
    "zb-v": zb_v,
}
SCHEDULES: Registry[Callable[[int, int, int], Schedule]] = Registry("SCHEDULES", ("p", "m", "v"), _OURS)


def stage_map(name: str, p: int, v: int = 1) -> StageMap:
    """Return the stage map of SCHEDULES[name] for p * v stages.

    Raises ValueError for an unknown name or sizes that do not fit.
    """
    if name not in SCHEDULES:
        raise ValueError(f"--pipeline-schedule is {name}; it must be one of {', '.join(SCHEDULES)}")
    return _stages_of(name, SCHEDULES[name], p, v)


@cache
def _stages_of(name: str, make: Callable[[int, int, int], Schedule], p: int, v: int) -> StageMap:
    return stages_in(make_step(name, p, 2 * p, v))


def make_step(name: str, p: int, m: int, v: int = 1, group: int | None = None) -> Schedule:
    """Return SCHEDULES[name] for these sizes, checked: each action once, each stage on one rank for all m.

    group: for a schedule with chunks that take turns (`has_groups`). Raises ValueError. A script may add schedules.
    Without the check, a missing backward would silently drop gradients.
    """
    schedule = unchecked_step(name, p, m, v, group)
    reference = SCHEDULES[name](p, 2 * p, v)  # from which `stage_map` is read
    problems = [*_problems_of_type(schedule), *_problems_of_type(reference)][:1]
    if not problems:
        problems = missing_or_surplus_actions(schedule, p, m, v)
    if not problems:
        stages = stages_in(schedule)
        expected = stages_in(reference)
        if stages != expected:
            ranks = f"{[*stages.ranks]} with {m} microbatches, on {[*expected.ranks]} with {2 * p}"
            problems = [f"the stages of the schedule are on ranks {ranks}; they must not move"]
    if problems:
        more = f", and {len(problems) - 3} more" if len(problems) > 3 else ""
        raise ValueError(f"{name}: {'; '.join(problems[:3])}{more}; fix SCHEDULES[{name!r}]")
    return schedule


def unchecked_step(name: str, p: int, m: int, v: int = 1, group: int | None = None) -> Schedule:
    """Return what SCHEDULES[name] makes for these sizes. Raises ValueError if it refuses them."""
    if group is not None and has_groups(name):
        return SCHEDULES[name](p, m, v, group)
    return SCHEDULES[name](p, m, v)


def has_groups(name: str) -> bool:
    """Return whether a rank's chunks take turns after groups of microbatches whose size can be chosen."""
    return name in SCHEDULES and "group" in inspect.signature(SCHEDULES[name]).parameters


def _problems_of_type(schedule: Any) -> Iterator[str]:
    """Yield a problem if a function of SCHEDULES did not return a list of Actions for each rank."""
    expected = "it must return a list of Actions for each rank"
    if not isinstance(schedule, Sequence):
        yield f"the schedule returned a {type(schedule).__name__}; {expected}"
        return
    for rank, actions in enumerate(schedule):
        if not isinstance(actions, Sequence):
            yield f"for rank {rank} the schedule returned a value of type {type(actions).__name__}; {expected}"
            return
        others = [entry for entry in actions if not isinstance(entry, Action)]
        if others:
            kind = type(others[0]).__name__
            yield f"among the actions of rank {rank} the schedule returned {others[0]!r:.40} (type {kind}); {expected}"
            return


def default_chunks(name: str | None) -> int:
    """Return the default number of chunks per rank: the default of v in SCHEDULES[name], else 1.

    It is also 1 for an unknown name.
    """
    if name not in SCHEDULES:
        return 1
    v = inspect.signature(SCHEDULES[name]).parameters.get("v")
    return 1 if v is None or v.default is inspect.Parameter.empty else v.default


def missing_or_surplus_actions(schedule: Schedule, p: int, m: int, v: int = 1) -> list[str]:
    """Return the missing and surplus actions of a schedule for m microbatches through p * v stages.

    Each stage computes, on one rank, F and B, or F, I and W, once for each microbatch.
    """
    if len(schedule) != p:
        return [f"it has lists for {len(schedule)} ranks, but the pipeline has {p}"]

    # the rank of each stage: the one with most of its actions
    counts = Counter((action.stage, rank) for rank, actions in enumerate(schedule) for action in actions)
    rank_of = {stage: max(range(p), key=lambda rank: counts[stage, rank]) for stage in range(p * v)}
    problems = []
    for rank in range(p):
        stages = [stage for stage in rank_of if rank_of[stage] == rank]
        if len(stages) != v:
            problems.append(f"rank {rank} has stages {stages}, not {v} of {p * v}")
    if problems:
        return problems

    # the actions of a step, against those in the lists
    times = Counter(action for actions in schedule for action in actions)
    expected = []
    for stage, microbatch in product(range(p * v), range(m)):
        is_split = any(Action(op, stage, microbatch) in times for op in (Op.I, Op.W))
        for op in (Op.F, Op.I, Op.W) if is_split else (Op.F, Op.B):
            expected.append(Action(op, stage, microbatch))
    surplus = times.keys() - set(expected)
    for action in expected:
        if action not in times:
            problems.append(f"rank {rank_of[action.stage]} lacks {action}, {_MEANING[action.op]}")
    problems += [f"{action} occurs {count} times" for action, count in times.items() if count > 1]
    problems += [f"{action} does not belong to the step" for action in sorted(surplus, key=str)]
    for rank, actions in enumerate(schedule):
        for action in actions:
            if action not in surplus and rank_of[action.stage] != rank:
                problems.append(f"rank {rank} has {action}, but its stage is on rank {rank_of[action.stage]}")
    return problems


_MEANING = {
    Op.F: "a forward",
    Op.B: "a backward",
    Op.I: "the input half of a backward",
    Op.W: "the weight half of a backward",
}
