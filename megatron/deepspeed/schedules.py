"""DeepSpeed's learning rates by steps: what a file's `scheduler` names, over `LearningRateSchedule`, with a step for a sample.

A number holds for all groups, a list has one for each. A warm-up from 0 has rate 0 in the first two updates, as in DeepSpeed.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from megatron.core.config import ConfigError
from megatron.core.optimizer.group_schedule import GroupSchedule
from megatron.core.optimizer.lr_schedule import LearningRateSchedule

Rates = float | Sequence[float]


def WarmupLR(
    optimizer: Any,
    warmup_min_lr: Rates = 0.0,
    warmup_max_lr: Rates | None = None,
    warmup_num_steps: int = 1000,
    warmup_type: str = "log",
    last_batch_iteration: int = -1,
) -> GroupSchedule:
    """Up to `warmup_max_lr`, by default the groups' own rates, which stays."""
    highest = [group["lr"] for group in optimizer.param_groups] if warmup_max_lr is None else warmup_max_lr
    ends, warmup = (warmup_min_lr, highest, warmup_min_lr), (warmup_num_steps, warmup_type)
    return _schedule(optimizer, ends, warmup, 0, "constant", last_batch_iteration)


def WarmupDecayLR(
    optimizer: Any,
    total_num_steps: int,
    warmup_min_lr: Rates = 0.0,
    warmup_max_lr: Rates = 0.001,
    warmup_num_steps: int = 1000,
    warmup_type: str = "log",
    last_batch_iteration: int = -1,
) -> GroupSchedule:
    """Up to `warmup_max_lr`, then linearly down to `warmup_min_lr` at `total_num_steps`."""
    ends, warmup = (warmup_min_lr, warmup_max_lr, warmup_min_lr), (warmup_num_steps, warmup_type)
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
    """From the share `warmup_min_ratio` up to the groups' own rates, then along a cosine to the share `cos_min_ratio`."""
    highest = [float(group["lr"]) for group in optimizer.param_groups]
    first, last = ([rate * ratio for rate in highest] for ratio in (warmup_min_ratio, cos_min_ratio))
    warmup = (warmup_num_steps, warmup_type)
    return _schedule(optimizer, (last, highest, first), warmup, total_num_steps, "cosine", last_batch_iteration)


def _schedule(
    optimizer: Any, ends: tuple[Rates, ...], warmup: tuple[int, str], total: int, style: Any, last_step: int
) -> GroupSchedule:
    """ends: the rates at the end, at the height, at the start. warmup: (steps, log or linear)."""
    steps, kind = warmup
    groups = len(optimizer.param_groups)
    if kind not in ("log", "linear") or steps < 1:
        raise ConfigError(f"ds_config: scheduler warms up in {steps} steps by {kind!r}; give 1 or more, log or linear")
    lists = [list(rates) if isinstance(rates, list | tuple) else [rates] * groups for rates in ends]
    if any(len(rates) != groups for rates in lists):
        raise ConfigError(f"ds_config: scheduler gives rates {lists} to {groups} groups; give one, or {groups}")
    made = [
        LearningRateSchedule(high, low, first, max(2, steps), total, style, warmup_style=kind)
        for low, high, first in zip(*lists)
    ]
    return GroupSchedule(optimizer, [partial(_rate, one) for one in made], last_step)


def _rate(schedule: LearningRateSchedule, step: int) -> float:
    """DeepSpeed's cosine is a step ahead after the warm-up, and its first update has rate 0."""
    if schedule.style != "cosine":
        return schedule.at(max(step, 0))
    return schedule.at(step + (step >= schedule.warmup)) if step >= 0 else 0.0


_SCHEDULES = {make.__name__: make for make in (WarmupLR, WarmupDecayLR, WarmupCosineLR)}


def make_schedule(asked: Mapping[str, Any], optimizer: Any) -> GroupSchedule:
    """The schedule of a file's `scheduler` section."""
    kind, params = asked["type"], asked.get("params") or {}
    if kind not in _SCHEDULES:
        raise ConfigError(
            f"ds_config: scheduler {kind!r} is not supported; use {', '.join(_SCHEDULES)}, or pass lr_scheduler= to initialize()"
        )
    try:
        return _SCHEDULES[kind](optimizer, **params)
    except TypeError as error:
        raise ConfigError(f"ds_config: scheduler: {error}") from error
