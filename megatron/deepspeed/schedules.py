"""DeepSpeed's learning rates by steps: what a file's `scheduler` names.

A schedule writes `lr` into every group of the optimizer: once when it is made, which the first update reads, and after every
update. A number holds for all groups, a list has one for each. The formulas are DeepSpeed's: a warm-up from 0 has rate 0 in the
first two updates.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from megatron.core.config import ConfigError

Rates = float | Sequence[float]


class StepSchedule:
    """`height(step)`: the rate between `lowest` (0) and `highest` (1) after this many updates less one."""

    def __init__(self, optimizer: Any, height: Callable[[int], float], lowest: Rates, highest: Rates, step: int):
        self.optimizer, self._height = optimizer, height
        groups = len(optimizer.param_groups)
        lists = [list(rates) if isinstance(rates, list | tuple) else [rates] * groups for rates in (lowest, highest)]
        if any(len(rates) != groups for rates in lists):
            raise ConfigError(f"ds_config: scheduler gives rates {lists} to {groups} groups; give one, or {groups}")
        self._ends = list(zip(*lists))
        self.step(step)

    def step(self, last_batch_iteration: int | None = None) -> None:
        """One update is done; last_batch_iteration: its number, by default the next."""
        following = self.last_batch_iteration + 1 if last_batch_iteration is None else last_batch_iteration
        self.last_batch_iteration = following
        for group, rate in zip(self.optimizer.param_groups, self.get_last_lr()):
            group["lr"] = rate

    def get_last_lr(self) -> list[float]:
        """The rate of each group in the next update."""
        height = self._height(self.last_batch_iteration)
        return [low + (high - low) * height for low, high in self._ends]

    get_lr = get_last_lr

    def state_dict(self) -> dict[str, int]:
        return {"last_batch_iteration": self.last_batch_iteration}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        self.step(int(state["last_batch_iteration"]))


def _warmup(steps: int, kind: str, after: Callable[[int], float], first: float = 0.0) -> Callable[[int], float]:
    """The height of a warm-up from `first` by the logarithm of the step or linearly, then `after`. Before it: 0."""
    if kind not in ("log", "linear") or steps < 1:
        raise ConfigError(f"ds_config: scheduler warms up in {steps} steps by {kind!r}; give 1 or more, log or linear")
    steps = max(2, steps)

    def height(step: int) -> float:
        if not 0 <= step < steps:
            return after(step) if step > 0 else 0.0
        done = math.log(step + 1) / math.log(steps) if kind == "log" else step / steps
        return first + done * (1 - first)

    return height


def WarmupLR(
    optimizer: Any,
    warmup_min_lr: Rates = 0.0,
    warmup_max_lr: Rates | None = None,
    warmup_num_steps: int = 1000,
    warmup_type: str = "log",
    last_batch_iteration: int = -1,
) -> StepSchedule:
    """Up to `warmup_max_lr`, by default the groups' own rates, which stays."""
    highest = _own_rates(optimizer) if warmup_max_lr is None else warmup_max_lr
    height = _warmup(warmup_num_steps, warmup_type, lambda step: 1.0)
    return StepSchedule(optimizer, height, warmup_min_lr, highest, last_batch_iteration)


def WarmupDecayLR(
    optimizer: Any,
    total_num_steps: int,
    warmup_min_lr: Rates = 0.0,
    warmup_max_lr: Rates = 0.001,
    warmup_num_steps: int = 1000,
    warmup_type: str = "log",
    last_batch_iteration: int = -1,
) -> StepSchedule:
    """Up to `warmup_max_lr`, then linearly down to `warmup_min_lr` at `total_num_steps`."""
    length = max(1.0, total_num_steps - max(2, warmup_num_steps))
    height = _warmup(warmup_num_steps, warmup_type, lambda step: max(0.0, (total_num_steps - step) / length))
    return StepSchedule(optimizer, height, warmup_min_lr, warmup_max_lr, last_batch_iteration)


def WarmupCosineLR(
    optimizer: Any,
    total_num_steps: int,
    warmup_min_ratio: float = 0.0,
    warmup_num_steps: int = 1000,
    cos_min_ratio: float = 0.0001,
    warmup_type: str = "log",
    last_batch_iteration: int = -1,
) -> StepSchedule:
    """From the share `warmup_min_ratio` up to the groups' own rates, then along a cosine to the share `cos_min_ratio`."""
    start = max(2, warmup_num_steps)

    def after(step: int) -> float:
        done = min(1.0, (step - start + 1) / max(1, total_num_steps - start))
        return cos_min_ratio + (1 - cos_min_ratio) * (1 + math.cos(math.pi * done)) / 2

    height = _warmup(warmup_num_steps, warmup_type, after, warmup_min_ratio)
    return StepSchedule(optimizer, height, 0.0, _own_rates(optimizer), last_batch_iteration)


def _own_rates(optimizer: Any) -> list[float]:
    return [float(group["lr"]) for group in optimizer.param_groups]


_SCHEDULES = {make.__name__: make for make in (WarmupLR, WarmupDecayLR, WarmupCosineLR)}


def make_schedule(asked: Mapping[str, Any], optimizer: Any) -> StepSchedule:
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
