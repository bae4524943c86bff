"""Learning rates by steps for any optimizer with torch's `param_groups`.

They have the names and formulas of DeepSpeed.

    schedule = WarmupDecayLR(optimizer, total_num_steps=10_000)         writes the rate of the first update
    schedule.step()                                                     after each update

A number is for all groups, a list has one for each. A warm-up from 0 has rate 0 in the first two updates. Warm-ups are
`LearningRateSchedule`s whose samples are steps.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

from megatron.core.base.dataclass_flags import ConfigError
from megatron.core.optimizer.lr_wd_schedule_by_samples import LearningRateSchedule
from megatron.core.optimizer.write_lr_into_param_groups import GroupSchedule, one_cycle, range_test

Rates = float | Sequence[float]


def LRRangeTest(
    optimizer: Any,
    lr_range_test_min_lr: Rates = 1e-3,
    lr_range_test_step_size: int = 2000,
    lr_range_test_step_rate: float = 1.0,
    lr_range_test_staircase: bool = False,
    last_batch_iteration: int = -1,
) -> GroupSchedule:
    """Rise from `lr_range_test_min_lr` by its share `lr_range_test_step_rate` every `lr_range_test_step_size` steps."""
    (lowest,) = _per_group(optimizer, lr_range_test_min_lr)
    rates = []
    for rate in lowest:
        rates.append(
            range_test(rate, lr_range_test_step_size, lr_range_test_step_rate, by_steps=lr_range_test_staircase)
        )
    return GroupSchedule(optimizer, rates, last_batch_iteration)


def OneCycle(
    optimizer: Any,
    cycle_min_lr: float,
    cycle_max_lr: float,
    decay_lr_rate: float = 0.0,
    cycle_first_step_size: int = 2000,
    cycle_second_step_size: int | None = None,
    cycle_first_stair_count: int = 0,
    cycle_second_stair_count: int | None = None,
    decay_step_size: int = 0,
    cycle_momentum: bool = True,
    cycle_min_mom: float = 0.8,
    cycle_max_mom: float = 0.9,
    decay_mom_rate: float = 0.0,
    last_batch_iteration: int = -1,
) -> GroupSchedule:
    """Rise and fall once, and Adam's first beta falls and rises; then both decay.

    Stairs: of each half; releases of DeepSpeed before 0.19 accept them without effect.
    """
    sizes = (cycle_first_step_size, cycle_second_step_size or cycle_first_step_size)
    second_stairs = cycle_first_stair_count if cycle_second_stair_count is None else cycle_second_stair_count
    stairs = (cycle_first_stair_count, second_stairs)

    def decay_factor(rate: float, steps: float) -> float:
        if not decay_step_size:
            return 1
        return 1 + rate * steps / decay_step_size

    rate = one_cycle(
        sizes, stairs, cycle_min_lr, cycle_max_lr, rests=lambda n: cycle_min_lr / decay_factor(decay_lr_rate, n)
    )
    beta = one_cycle(
        sizes, stairs, cycle_max_mom, cycle_min_mom, rests=lambda n: cycle_max_mom * decay_factor(decay_mom_rate, n)
    )

    def betas(step: int) -> tuple[float, float]:
        # DeepSpeed begins the first update with the lowest beta, and the cycle with the highest.
        return (cycle_min_mom if step < 0 else beta(step), 0.99)

    groups = optimizer.param_groups
    cycles_betas = cycle_momentum and "betas" in groups[0]
    rates = [rate] * len(groups)
    return GroupSchedule(optimizer, rates, last_batch_iteration, betas=betas if cycles_betas else None)


def WarmupLR(
    optimizer: Any,
    warmup_min_lr: Rates = 0.0,
    warmup_max_lr: Rates | None = None,
    warmup_num_steps: int = 1000,
    warmup_type: str = "log",
    last_batch_iteration: int = -1,
) -> GroupSchedule:
    """Rise to `warmup_max_lr`, by default the groups' own rates, and stay there."""
    highest = warmup_max_lr
    if highest is None:
        highest = [group["lr"] for group in optimizer.param_groups]
    ends = (warmup_min_lr, highest, warmup_min_lr)
    return _schedule(optimizer, ends, (warmup_num_steps, warmup_type), 0, "constant", last_batch_iteration)


def WarmupDecayLR(
    optimizer: Any,
    total_num_steps: int,
    warmup_min_lr: Rates = 0.0,
    warmup_max_lr: Rates = 0.001,
    warmup_num_steps: int = 1000,
    warmup_type: str = "log",
    last_batch_iteration: int = -1,
) -> GroupSchedule:
    """Rise to `warmup_max_lr`, then fall linearly to `warmup_min_lr` at `total_num_steps`."""
    if total_num_steps < warmup_num_steps:
        raise ConfigError(
            f"total_num_steps is {total_num_steps}; it must be at least warmup_num_steps ({warmup_num_steps})"
        )
    ends = (warmup_min_lr, warmup_max_lr, warmup_min_lr)
    warmup = (warmup_num_steps, warmup_type)
    return _schedule(optimizer, ends, warmup, total_num_steps, "linear", last_batch_iteration)


def WarmupCosineLR(
    optimizer: Any,
    total_num_steps: int,
    warmup_min_ratio: float = 0.0,
    warmup_num_steps: int = 1000,
    cos_min_ratio: float = 0.0001,
    warmup_type: str = "log",
    last_batch_iteration: int = -1,
) -> GroupSchedule:
    """Rise from the share `warmup_min_ratio` to the groups' own rates, then fall along a cosine.

    The rates end at the share `cos_min_ratio`.
    """
    highest = [float(group["lr"]) for group in optimizer.param_groups]
    first = [rate * warmup_min_ratio for rate in highest]
    last = [rate * cos_min_ratio for rate in highest]
    warmup = (warmup_num_steps, warmup_type)
    return _schedule(optimizer, (last, highest, first), warmup, total_num_steps, "cosine", last_batch_iteration)


def _schedule(
    optimizer: Any, ends: tuple[Rates, ...], warmup: tuple[int, str], total: int, style: Any, last_step: int
) -> GroupSchedule:
    """Return a warm-up and a decay in `style`. ends: the rates at the end, at the height, at the start.

    warmup: (steps, log or linear).
    """
    steps, kind = warmup
    if kind not in ("log", "linear") or steps < 1:
        raise ConfigError(
            f"the warm-up of a schedule has {steps} steps and the type {kind!r}; give 1 or more steps, and the "
            "type log or linear"
        )
    rates = []
    for low, high, first in zip(*_per_group(optimizer, *ends)):
        schedule = LearningRateSchedule(high, low, first, max(2, steps), total, style, warmup_style=kind)
        rates.append(partial(_rate, schedule))
    return GroupSchedule(optimizer, rates, last_step)


def _per_group(optimizer: Any, *rates_of: Rates) -> list[list[float]]:
    """Return each of these rates as a list of one number per group."""
    groups = len(optimizer.param_groups)
    lists = [list(rates) if isinstance(rates, list | tuple) else [rates] * groups for rates in rates_of]
    if any(len(rates) != groups for rates in lists):
        raise ConfigError(
            f"a schedule has the rates {lists} for {groups} parameter groups; give one rate, or a list of {groups}"
        )
    return lists


def _rate(schedule: LearningRateSchedule, step: int) -> float:
    """Return the rate of an update.

    DeepSpeed's cosine is a step ahead after the warm-up; its first update has rate 0.
    """
    if schedule.style != "cosine":
        return schedule.at(max(step, 0))
    if step < 0:
        return 0.0
    if step >= schedule.warmup:
        step += 1
    return schedule.at(step)


STEP_SCHEDULES = {make.__name__: make for make in (LRRangeTest, OneCycle, WarmupLR, WarmupDecayLR, WarmupCosineLR)}
