"""Training schedules by name, each checked when it is made, and what follows from a name alone: stage map, chunks per
rank."""

import inspect
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from itertools import product
from typing import Any

from megatron.core.base.registry import Table
from megatron.core.parallel.stage_map import StageMap
from megatron.core.pipeline_parallel.schedule.actions import (
    Action,
    Op,
    Schedule,
    gpipe,
    interleaved,
    one_f_one_b,
    stages_in,
    zb_h1,
    zb_interleaved,
)
from megatron.core.pipeline_parallel.schedule.zb_v import zb_v

# Name -> (p, m, v) -> Schedule, ValueError if the sizes do not fit. Scripts may add entries. The stage map is read from the
# lists for m = 2 p, before the number of microbatches is known, so it must be equal for all m. A schedule for one number of
# chunks per rank only has it as the default of its v.
_OURS = {
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "interleaved": interleaved,
    "zb-h1": zb_h1,
    "zb-interleaved": zb_interleaved,
    "zb-v": zb_v,
}
SCHEDULES: Table[Callable[[int, int, int], Schedule]] = Table("SCHEDULES", ("p", "m", "v"), _OURS)


def stage_map(name: str, p: int, v: int = 1) -> StageMap:
    """The stage map of SCHEDULES[name] for p * v stages. ValueError for an unknown name or sizes that do not fit."""
    if name not in SCHEDULES:
        raise ValueError(f"--pipeline-schedule is {name}; it must be one of {', '.join(SCHEDULES)}")
    return _stages_of(name, SCHEDULES[name], p, v)


@cache
def _stages_of(name: str, make: Callable[[int, int, int], Schedule], p: int, v: int) -> StageMap:
    return stages_in(make_step(name, p, 2 * p, v))


def make_step(name: str, p: int, m: int, v: int = 1) -> Schedule:
    """SCHEDULES[name] for these sizes, checked: each action once, stages where they are for all m. Raises ValueError.

    A script may add schedules. Without the check, a missing backward would silently drop gradients.
    """
    schedule, longer = SCHEDULES[name](p, m, v), SCHEDULES[name](p, 2 * p, v)
    problems = [*_problems_of_type(schedule), *_problems_of_type(longer)][:1] or problems_of(schedule, p, m, v)
    if not problems and (found := stages_in(schedule)) != (stages := stages_in(longer)):
        places = f"{[*found.ranks]} with {m} microbatches, on {[*stages.ranks]} with {2 * p}"
        problems = [f"its stages are on ranks {places}; they must not move"]
    if problems:
        more = f", and {len(problems) - 3} more" if len(problems) > 3 else ""
        raise ValueError(f"{name}: {'; '.join(problems[:3])}{more}; fix SCHEDULES[{name!r}]")
    return schedule


def _problems_of_type(schedule: Any) -> Iterator[str]:
    """What a function of SCHEDULES returned in place of a list of Actions for each rank."""
    wanted = "it must return a list of Actions for each rank"
    if not isinstance(schedule, Sequence):
        yield f"it returned a {type(schedule).__name__}; {wanted}"
        return
    for rank, actions in enumerate(schedule):
        if not isinstance(actions, Sequence):
            yield f"for rank {rank} it returned a {type(actions).__name__}; {wanted}"
            return
        if (strange := next((x for x in actions if not isinstance(x, Action)), None)) is not None:
            yield f"for rank {rank} it returned {strange!r:.40}, a {type(strange).__name__}, among the actions; {wanted}"
            return


def default_chunks(name: str | None) -> int:
    """Chunks per rank where none are asked for: the default of v in SCHEDULES[name], else 1, also for an unknown name."""
    if name not in SCHEDULES:
        return 1
    v = inspect.signature(SCHEDULES[name]).parameters.get("v")
    return 1 if v is None or v.default is inspect.Parameter.empty else v.default


def problems_of(schedule: Schedule, p: int, m: int, v: int = 1) -> list[str]:
    """Missing and surplus actions of a schedule for m microbatches through p * v stages.

    Each stage computes, on one rank, F and B, or F, I and W, once for each microbatch.
    """
    if len(schedule) != p:
        return [f"it has lists for {len(schedule)} ranks, but the pipeline has {p}"]
    found = Counter((action.stage, rank) for rank, actions in enumerate(schedule) for action in actions)
    home = {stage: max(range(p), key=lambda rank: found[stage, rank]) for stage in range(p * v)}
    uneven = [rank for rank in range(p) if list(home.values()).count(rank) != v]
    if uneven:
        return [f"rank {rank} has stages {[s for s in home if home[s] == rank]}, not {v} of {p * v}" for rank in uneven]
    times = Counter(action for actions in schedule for action in actions)
    wanted = [
        Action(op, stage, microbatch)
        for stage, microbatch in product(range(p * v), range(m))
        for op in (Op.F, *((Op.I, Op.W) if _is_split(times, stage, microbatch) else (Op.B,)))
    ]
    needless = times.keys() - set(wanted)
    return [
        *(f"rank {home[a.stage]} lacks {a}, {_MEANING[a.op]}" for a in wanted if a not in times),
        *(f"{action} occurs {count} times" for action, count in times.items() if count > 1),
        *(f"{action} does not belong to the step" for action in sorted(needless, key=str)),
        *(
            f"rank {rank} has {action}, but its stage is on rank {home[action.stage]}"
            for rank, actions in enumerate(schedule)
            for action in actions
            if action not in needless and home[action.stage] != rank
        ),
    ]


def _is_split(times: Mapping[Action, int], stage: int, microbatch: int) -> bool:
    return any(Action(op, stage, microbatch) in times for op in (Op.I, Op.W))


_MEANING = {
    Op.F: "a forward",
    Op.B: "a backward",
    Op.I: "the input half of a backward",
    Op.W: "the weight half of a backward",
}
