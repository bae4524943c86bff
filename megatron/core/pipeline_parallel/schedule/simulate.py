"""Schedules are simulated: start and end times, bubble, microbatches in flight, and an explanation of deadlocks."""

from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple

from megatron.core.base.user_error_and_torchrun_error_file import is_user_error
from megatron.core.pipeline_parallel.schedule.actions import Action, Op, Schedule, count_stages, dependencies
from megatron.core.pipeline_parallel.schedule.registry import make_step

DEFAULT_COST = {Op.F: 1, Op.B: 2, Op.I: 1, Op.W: 1}  # a backward has two matrix products for each one of the forward


class Timeline(NamedTuple):
    """The start and the end of every action, in the unit of the costs."""

    start: dict[Action, float]
    end: dict[Action, float]


def make_schedule(name: str, p: int, m: int, v: int = 1, group: int | None = None) -> Schedule:
    """Return the schedule of `make_step`, which is free of deadlock. Raises ValueError otherwise."""
    schedule = make_step(name, p, m, v, group)
    try:
        simulate(schedule)
    except ValueError as error:
        if not is_user_error(error):
            raise
        raise ValueError(f"{name}: {error}") from None
    return schedule


def simulate(schedule: Schedule, cost: Mapping[Op, float] = DEFAULT_COST, transfer: float = 0.0) -> Timeline:
    """Return start and end of every action, in the unit of `cost`, if each rank runs its list as early as possible.

    schedule: compute actions only, before `lower.add_transfers`. transfer: time of a result to another rank; it
    overlaps with compute. Raises ValueError if the lists deadlock.
    """
    _check_cost(schedule, cost)
    position = locate(schedule)  # action -> (rank, index)
    num_stages = count_stages(schedule)
    start: dict[Action, float] = {}
    end: dict[Action, float] = {}
    clock = [0.0] * len(schedule)  # by rank: when it is free

    def attempt(rank: int, heads: list[int]) -> list[Action]:
        action = schedule[rank][heads[rank]]
        needs = dependencies(action, num_stages)
        missing = [need for need in needs if need not in end]
        if missing:
            return missing
        start[action] = clock[rank]
        for need in needs:
            arrival = end[need] if position[need][0] == rank else end[need] + transfer
            start[action] = max(start[action], arrival)
        end[action] = clock[rank] = start[action] + cost[action.op]
        return []

    run_in_order(schedule, attempt)
    return Timeline(start, end)


def bubble(schedule: Schedule, cost: Mapping[Op, float] = DEFAULT_COST, transfer: float = 0.0) -> float:
    """Return idle time over ideal time, which is the compute of the busiest rank (arXiv:2104.04473, section 2.2)."""
    ideal = max(sum(cost[action.op] for action in actions) for actions in schedule)
    return max(simulate(schedule, cost, transfer).end.values()) / ideal - 1


def bubble_in_theory(
    name: str, p: int, m: int, v: int = 1, cost: Mapping[Op, float] = DEFAULT_COST, transfer: float = 0.0
) -> float | None:
    """Return the closed form of `bubble`; None for a script's schedule, or if transfers take time.

    (p - 1) / (v m) where backwards are whole (arXiv:2104.04473, section 2.2). ZB-H1 idles for (p - 1)(tF + tI - tW) if
    m >= p and no op is cheaper than W (arXiv:2401.10241, table 1). The form below extends it to all costs, all m and
    chunks; it is empirical and tested over a grid. ZB-V idles for p - 1 forwards of a chunk, until the last rank has
    work, if m >= p and F, I and W take equally long; None for others.
    """
    if transfer or name not in _PEAK_LIVE:
        return None
    if not name.startswith("zb-"):
        return (p - 1) / (v * m)
    forward = cost[Op.F]
    input_grad = cost[Op.I]
    weight_grad = cost[Op.W]
    least = min(forward, input_grad, weight_grad)
    idle = (p - 1) * (forward + input_grad) - (min(p, m) - 1) * least
    if name == "zb-v":
        if m < p or not forward == input_grad == weight_grad:
            return None
        idle = (p - 1) * forward
    return idle / (v * m * (forward + input_grad + weight_grad))


def peak_live(schedule: Schedule) -> list[int]:
    """Return, per rank, the peak number of microbatches in flight, counted per chunk: between their F and their B or W.

    An activation of a chunk is 1/v of a rank's. Not meaningful for `forward_only`, which frees activations at once.
    """
    return peak_bytes(schedule, [1] * count_stages(schedule))


# Microbatches of chunks in flight on a rank, at most v m: section 2.2 of the same papers. The last two are tested over
# a grid of sizes.
_PEAK_LIVE = {
    "gpipe": lambda rank, p, m, v: m,
    "1f1b": lambda rank, p, m, v: p - rank,
    "interleaved": lambda rank, p, m, v: 2 * (p - rank - 1) + (v - 1) * p + 1,
    "zb-h1": lambda rank, p, m, v: p,
    "zb-interleaved": lambda rank, p, m, v: 2 * (p - 1) - rank + (v - 1) * p + 1,
    "zb-v": lambda rank, p, m, v: min(2 * p, m + rank + 1),
}


def peak_live_in_theory(name: str, p: int, m: int, v: int = 1) -> list[int] | None:
    """Return the closed form of `peak_live`; None for a script's schedule."""
    live = _PEAK_LIVE.get(name)
    return None if live is None else [min(live(rank, p, m, v), v * m) for rank in range(p)]


def peak_bytes(schedule: Schedule, bytes_of_stage: Sequence[float], kept_for_weights: float = 1.0) -> list[float]:
    """Return, per rank, the peak bytes of saved activations, if an F of a stage saves `bytes_of_stage[stage]`.

    B and W free them. I frees the share 1 - `kept_for_weights`: it drops the tensors saved by attention and norms,
    keeps the inputs of the linear layers, and adds their output gradients for W, so the share kept may exceed 1.
    Transfer buffers are not counted.
    """
    share = {Op.F: 1, Op.B: -1, Op.I: kept_for_weights - 1, Op.W: -kept_for_weights}
    return [max(accumulate(share[a.op] * bytes_of_stage[a.stage] for a in actions)) for actions in schedule]


def peak_inputs(schedule: Schedule, stage: int, *, until_weight_grads: bool = False) -> int:
    """Return the peak number of microbatches of `stage` between F and B or I, for which recompute needs the inputs.

    until_weight_grads: between F and B or W, since the weight gradients that I puts off read the inputs themselves.
    """
    share = {Op.F: 1, Op.B: -1, Op.W if until_weight_grads else Op.I: -1}
    steps = [share.get(a.op, 0) for actions in schedule for a in actions if a.stage == stage]
    return max(accumulate(steps), default=0)


def show_around(schedule: Schedule, rank: int, index: int, around: int = 3) -> str:
    """Return the actions around position `index`, one row per rank, with an arrow at that of `rank`.

    It is for error messages. Lowered schedules are allowed. Columns are positions in the lists, not times.
    """
    return _grid(schedule, [index] * len(schedule), arrows={rank}, around=around)


def locate(schedule: Schedule) -> dict[Action, tuple[int, int]]:
    """Return the (rank, position) of every action. ValueError if an action occurs twice."""
    position: dict[Action, tuple[int, int]] = {}
    for rank, actions in enumerate(schedule):
        for index, action in enumerate(actions):
            if action in position:
                first_rank, first_index = position[action]
                raise ValueError(
                    f"schedule: {action} is on rank {first_rank} (position {first_index}) and again on rank "
                    f"{rank} (position {index}); an action must occur once\n{show_around(schedule, rank, index)}"
                )
            position[action] = rank, index
    return position


def run_in_order(schedule: Schedule, attempt: Callable[[int, list[int]], list[Action]]) -> None:
    """Run every rank's list in order. Raises ValueError, with the actions that each rank waits for, in a deadlock.

    attempt(rank, heads) either runs schedule[rank][heads[rank]] and returns [], or returns the actions that it waits
    for. `heads` has every rank's position.
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
    position = locate(schedule)

    def with_position(action: Action) -> str:
        if action not in position:
            return f"{action} (in no list)"
        rank, index = position[action]
        return f"{action} (rank {rank}, position {index})"

    lines = []
    for rank, needs in reasons.items():
        action = schedule[rank][heads[rank]]
        lines.append(
            f"  rank {rank}, position {heads[rank]}: {action} waits for {', '.join(map(with_position, needs))}"
        )
    grid = _grid(schedule, heads, arrows=reasons.keys())
    return "\n".join(["schedule: deadlock, every unfinished rank waits", *lines, grid])


def _grid(schedule: Schedule, centers: Sequence[int], *, arrows: Collection[int], around: int = 3) -> str:
    """Return one row per rank; the middle column is the rank's position in `centers`."""
    table = []
    for rank, (actions, center) in enumerate(zip(schedule, centers)):
        row = [f"rank {rank} at {center} |"]
        for index in range(center - around, center + around + 1):
            arrow = "-> " if index == center and rank in arrows else "   "
            row.append(f"{arrow}{actions[index]}" if 0 <= index < len(actions) else "")
        table.append(row)
    widths = [max(map(len, column)) for column in zip(*table)]
    lines = []
    for row in table:
        cells = [cell.ljust(width) for cell, width in zip(row, widths)]
        lines.append(" ".join(cells).rstrip())
    return "\n".join(lines)


def _check_cost(schedule: Schedule, cost: Mapping[Op, float]) -> None:
    unpriced = sorted({action.op.name for actions in schedule for action in actions if action.op not in cost})
    if unpriced:
        raise ValueError(
            f"simulate: the cost of {', '.join(unpriced)} is missing; `cost` has only "
            f"{', '.join(op.name for op in cost)}; pass the schedule as it is before add_transfers and add_reduce"
        )
    # With a cost of zero the order of actions at the same moment would be undefined.
    not_positive = [f"{op.name} ({value})" for op, value in cost.items() if not value > 0]
    if not_positive:
        raise ValueError(f"simulate: the cost of {', '.join(not_positive)} must be positive; change `cost`")
