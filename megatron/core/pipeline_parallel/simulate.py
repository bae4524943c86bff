"""Schedules on paper: start and end times, bubble, live activations, and who waits for whom in a deadlock."""

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import accumulate, product
from typing import NamedTuple

from megatron.core.pipeline_parallel.schedule import SCHEDULES, Action, Op, Schedule, count_stages, dependencies

DEFAULT_COST = {Op.F: 1, Op.B: 2, Op.I: 1, Op.W: 1}  # backward multiplies two matrices where forward multiplies one


class Timeline(NamedTuple):
    start: dict[Action, float]
    end: dict[Action, float]


def make_schedule(name: str, p: int, m: int, v: int = 1) -> Schedule:
    """The schedule that SCHEDULES has under `name`, known to do the whole step and to end. Raises ValueError otherwise.

    A schedule may be a fork's. One that forgets a backward would train on a part of its gradients without a word.
    """
    schedule = SCHEDULES[name](p, m, v)
    if problems := problems_of(schedule, p, m, v):
        more = f", and {len(problems) - 3} more like these" if len(problems) > 3 else ""
        raise ValueError(f"{name}: {'; '.join(problems[:3])}{more}; mend SCHEDULES[{name!r}]")
    try:
        simulate(schedule)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None
    return schedule


def problems_of(schedule: Schedule, p: int, m: int, v: int = 1) -> list[str]:
    """What a schedule lacks to be one whole step of m microbatches through p * v stages, or has too much.

    Every stage computes, on its own rank, F once and B once, or I and W once, of every microbatch.
    """
    if len(schedule) != p:
        return [f"it has lists for {len(schedule)} ranks, and the pipeline has {p}"]
    found = Counter((action.stage, rank) for rank, actions in enumerate(schedule) for action in actions)
    home = {stage: max(range(p), key=lambda rank: found[stage, rank]) for stage in range(p * v)}
    uneven = [rank for rank in range(p) if list(home.values()).count(rank) != v]
    if uneven:
        return [
            f"rank {rank} has the stages {[s for s in home if home[s] == rank]}, not {v} of {p * v}" for rank in uneven
        ]
    times = Counter(action for actions in schedule for action in actions)
    wanted = [
        Action(op, stage, microbatch)
        for stage, microbatch in product(range(p * v), range(m))
        for op in (Op.F, *((Op.I, Op.W) if _is_split(times, stage, microbatch) else (Op.B,)))
    ]
    needless = times.keys() - set(wanted)
    return [
        *(f"rank {home[a.stage]} lacks {a}, {_MEANING[a.op]}" for a in wanted if a not in times),
        *(f"{action} is there {count} times" for action, count in times.items() if count > 1),
        *(f"{action} is none of the step's" for action in sorted(needless, key=str)),
        *(
            f"rank {rank} has {action}, whose stage is on rank {home[action.stage]}"
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


def simulate(schedule: Schedule, cost: Mapping[Op, float] = DEFAULT_COST, transfer: float = 0.0) -> Timeline:
    """Start and end of every action, in the unit of `cost`, when each rank runs its list as early as it can.

    schedule: compute actions only, as before `lower.add_transfers`. transfer: from the end of an action to its result
    being on another rank; transfers overlap with compute. Raises ValueError if the lists can never finish.
    """
    _check_cost(schedule, cost)
    home, num_stages = locate(schedule), count_stages(schedule)
    start, end = {}, {}
    clock = [0.0] * len(schedule)

    def attempt(rank: int, heads: list[int]) -> list[Action]:
        action = schedule[rank][heads[rank]]
        needs = dependencies(action, num_stages)
        missing = [need for need in needs if need not in end]
        if not missing:
            arrivals = [end[need] + (transfer if home[need][0] != rank else 0) for need in needs]
            start[action] = max([clock[rank], *arrivals])
            end[action] = clock[rank] = start[action] + cost[action.op]
        return missing

    run_in_order(schedule, attempt)
    return Timeline(start, end)


def bubble(schedule: Schedule, cost: Mapping[Op, float] = DEFAULT_COST, transfer: float = 0.0) -> float:
    """Idle time over ideal time, the ideal being the busiest rank's compute alone (arXiv:2104.04473, section 2.2)."""
    ideal = max(sum(cost[action.op] for action in actions) for actions in schedule)
    return max(simulate(schedule, cost, transfer).end.values()) / ideal - 1


def bubble_in_theory(
    name: str, p: int, m: int, v: int = 1, cost: Mapping[Op, float] = DEFAULT_COST, transfer: float = 0.0
) -> float | None:
    """The closed form of `bubble`; None for a schedule of a fork, and where a transfer takes time: there is none then.

    (p - 1) / (v m) for all but ZB-H1 (arXiv:2104.04473, section 2.2). ZB-H1 idles for (p - 1)(tF + tI - tW) if m >= p
    and no op is cheaper than W (arXiv:2401.10241, table 1). What stands here holds for all costs and all m: it was
    found by trying, and is tested over a grid.
    """
    if transfer or name not in _PEAK_LIVE:
        return None
    if name != "zb-h1":
        return (p - 1) / (v * m)
    forward, input_grad = cost[Op.F], cost[Op.I]
    weight_grad = cost[Op.W]
    idle = (p - 1) * (forward + input_grad) - (min(p, m) - 1) * min(forward, input_grad, weight_grad)
    return idle / (m * (forward + input_grad + weight_grad))


def peak_live(schedule: Schedule) -> list[int]:
    """Per rank, the most microbatches of one stage between their F and their B or W at once: activations to hold.

    A chunk's activation is 1/v of a rank's. Means nothing for `forward_only`, where nothing waits for a backward.
    """
    return peak_bytes(schedule, [1] * count_stages(schedule))


# Microbatches alive on a rank, were there enough of them: section 2.2 of the same papers.
_PEAK_LIVE = {
    "gpipe": lambda rank, p, m, v: m,
    "1f1b": lambda rank, p, m, v: p - rank,
    "interleaved": lambda rank, p, m, v: 2 * (p - rank - 1) + (v - 1) * p + 1,
    "zb-h1": lambda rank, p, m, v: p,
}


def peak_live_in_theory(name: str, p: int, m: int, v: int = 1) -> list[int] | None:
    """The closed form of `peak_live`; None for a schedule of a fork."""
    live = _PEAK_LIVE.get(name)
    return None if live is None else [min(live(rank, p, m, v), v * m) for rank in range(p)]


def peak_bytes(schedule: Schedule, bytes_of_stage: Sequence[float], kept_for_weights: float = 1.0) -> list[float]:
    """Per rank, the most bytes of activations at once, where each stage's F makes `bytes_of_stage[stage]` of them.

    B and W free them. I leaves `kept_for_weights` of them: the inputs of the matrices without what attention and the
    norms had kept, and with the gradients of their outputs, which W multiplies; it may be more than 1. The peaks of
    1F1B and ZB-H1 with 1.0 are those of `peak_live`. Buffers of transfers are not counted.
    """
    share = {Op.F: 1, Op.B: -1, Op.I: kept_for_weights - 1, Op.W: -kept_for_weights}
    return [max(accumulate(share[a.op] * bytes_of_stage[a.stage] for a in actions)) for actions in schedule]


def peak_inputs(schedule: Schedule, stage: int) -> int:
    """The most microbatches of `stage` at once that are between their F and their B or I, which compute the stage
    again where it is recomputed."""
    share = {Op.F: 1, Op.B: -1, Op.I: -1}
    steps = [share.get(a.op, 0) for actions in schedule for a in actions if a.stage == stage]
    return max(accumulate(steps), default=0)


def show(schedule: Schedule, rank: int, index: int, around: int = 3) -> str:
    """The actions around position `index` of every rank, one row per rank, with an arrow at that of `rank`.

    For error messages; works for lowered schedules too. The columns are equal positions, not equal times.
    """
    return _grid(schedule, [index] * len(schedule), arrows={rank}, around=around)


def locate(schedule: Schedule) -> dict[Action, tuple[int, int]]:
    """Where every action stands, as (rank, position). Raises ValueError if one stands twice."""
    home = {}
    for rank, actions in enumerate(schedule):
        for index, action in enumerate(actions):
            if action in home:
                raise ValueError(
                    f"schedule: {action} is on rank {home[action][0]} (position {home[action][1]}) and again on rank "
                    f"{rank} (position {index}); every action must be there once\n{show(schedule, rank, index)}"
                )
            home[action] = rank, index
    return home


def run_in_order(schedule: Schedule, attempt: Callable[[int, list[int]], list[Action]]) -> None:
    """Run every rank's list from head to tail. Raises ValueError, naming who waits for what, if all are held up.

    attempt(rank, heads) does the action schedule[rank][heads[rank]] and returns [], or leaves it and returns the
    actions it waits for. `heads` holds every rank's position.
    """
    heads = [0] * len(schedule)
    progress = True
    while progress:
        progress = False
        for rank, actions in enumerate(schedule):
            while heads[rank] < len(actions) and not attempt(rank, heads):
                heads[rank] += 1
                progress = True
    waiting = [rank for rank, actions in enumerate(schedule) if heads[rank] < len(actions)]
    if waiting:
        reasons = {rank: attempt(rank, heads) for rank in waiting}
        raise ValueError(_describe_deadlock(schedule, heads, reasons))


def _describe_deadlock(schedule: Schedule, heads: Sequence[int], reasons: Mapping[int, list[Action]]) -> str:
    home = locate(schedule)

    def place(action: Action) -> str:
        if action not in home:
            return f"{action} (in no list)"
        rank, index = home[action]
        return f"{action} (rank {rank}, position {index})"

    lines = [
        f"  rank {rank}, position {heads[rank]}: {schedule[rank][heads[rank]]} waits for {', '.join(map(place, needs))}"
        for rank, needs in reasons.items()
    ]
    grid = _grid(schedule, heads, arrows=reasons.keys())
    return "\n".join(["schedule: it can never finish, every unfinished rank waits", *lines, grid])


def _grid(schedule: Schedule, centers: Sequence[int], *, arrows: Collection[int], around: int = 3) -> str:
    """One row per rank, the column in the middle being the rank's position in `centers`."""
    table = []
    for rank, (actions, center) in enumerate(zip(schedule, centers)):
        row = [f"rank {rank} at {center} |"]
        for index in range(center - around, center + around + 1):
            arrow = "-> " if index == center and rank in arrows else "   "
            row.append(f"{arrow}{actions[index]}" if 0 <= index < len(actions) else "")
        table.append(row)
    widths = [max(map(len, column)) for column in zip(*table)]
    return "\n".join(" ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in table)


def _check_cost(schedule: Schedule, cost: Mapping[Op, float]) -> None:
    unpriced = sorted({action.op.name for actions in schedule for action in actions if action.op not in cost})
    if unpriced:
        raise ValueError(
            f"simulate: there is no cost for {', '.join(unpriced)}, only for {', '.join(op.name for op in cost)}; "
            "pass the schedule as it was before add_transfers and add_reduce"
        )
    # A time of zero would leave open in which order two actions of the same moment run.
    wrong = [f"{op.name} ({value})" for op, value in cost.items() if not value > 0]
    if wrong:
        raise ValueError(f"simulate: the cost of {', '.join(wrong)} must be positive; change `cost`")
