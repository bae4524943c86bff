"""Learning rate schedules that write into the groups of an optimizer, for a script's own loop.

They go by the number of updates, or by samples.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from megatron.core.base.dataclass_flags import ConfigError
from megatron.core.optimizer.lr_wd_schedule_by_samples import (
    LearningRateConfig,
    LearningRateSchedule,
    WeightDecaySchedule,
    schedule_in_force,
)


class GroupSchedule:
    """Writes `lr` into every group of an optimizer.

    It does so once when it is created, which the first update reads, and after every update.

    rates: a function of the update's number, from -1, for each group. betas: such a function of Adam's betas, for all
    groups.
    """

    def __init__(
        self,
        optimizer: Any,
        rates: Sequence[Callable[[int], float]],
        last_batch_iteration: int = -1,
        *,
        betas: Callable[[int], tuple[float, float]] | None = None,
    ):
        self.optimizer = optimizer
        self._rates = list(rates)
        self._betas = betas
        self.step(last_batch_iteration)

    def step(self, last_batch_iteration: int | None = None) -> None:
        """Count an update, and write the rates of the next. last_batch_iteration: its number, by default the next."""
        if last_batch_iteration is None:
            last_batch_iteration = self.last_batch_iteration + 1
        self.last_batch_iteration = last_batch_iteration
        for group, rate in zip(self.optimizer.param_groups, self.get_last_lr()):
            group["lr"] = rate
            if self._betas is not None:
                group["betas"] = self._betas(last_batch_iteration)

    def get_last_lr(self) -> list[float]:
        """Return the rate of each group in the next update."""
        return [rate(self.last_batch_iteration) for rate in self._rates]

    get_lr = get_last_lr

    def state_dict(self) -> dict[str, int]:
        return {"last_batch_iteration": self.last_batch_iteration}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        self.step(int(state["last_batch_iteration"]))


class SampleSchedule:
    """Writes `lr` and `weight_decay` into the groups of an optimizer.

    The caller chooses the unit of a step: samples, in a run. A group may have its own `max_lr` and `min_lr`, and
    factors `lr_mult` and `wd_mult`.
    """

    def __init__(self, optimizer: Any, rate: LearningRateSchedule, decay: WeightDecaySchedule):
        self.optimizer = optimizer
        self.num_steps = 0
        self.rate = rate
        self.decay = decay
        self.step(0)

    def get_lr(self, param_group: Mapping[str, Any]) -> float:
        """Return the rate of this group, before its `lr_mult`."""
        rate = self.rate
        if param_group.get("max_lr") is not None:
            rate = replace(rate, lr=param_group["max_lr"])
        if param_group.get("min_lr") is not None:
            rate = replace(rate, min_lr=param_group["min_lr"])
        return rate.at(self.num_steps)

    def get_wd(self) -> float:
        """Return the weight decay, before a group's `wd_mult`."""
        return self.decay.at(self.num_steps)

    def step(self, increment: int) -> None:
        self.num_steps += increment
        for group in self.optimizer.param_groups:
            group["lr"] = self.get_lr(group) * group.get("lr_mult", 1.0)
            group["weight_decay"] = self.get_wd() * group.get("wd_mult", 1.0)

    def state_dict(self) -> dict[str, Any]:
        return {"num_steps": self.num_steps, "rate": asdict(self.rate), "decay": asdict(self.decay)}

    def resume(self, state: Mapping[str, Any], config: LearningRateConfig) -> None:
        """Continue where the saved schedule was.

        Raises ConfigError if it was another schedule and no option of `config` chooses one of them.
        """
        steps = state["num_steps"]
        self.rate = schedule_in_force(self.rate, state["rate"], config, what="learning rate", samples=steps)
        self.decay = schedule_in_force(self.decay, state["decay"], config, what="weight decay", samples=steps)
        self.num_steps = 0
        self.step(steps)


def range_test(lowest: float, size: int, rate: float, *, by_steps: bool = False) -> Callable[[int], float]:
    """Return the function of the update's number that gives `lowest` x (1 + rate x updates / size).

    by_steps: the quotient is rounded down.
    """
    if size < 1:
        raise ConfigError(f"a step of the learning rate range test has {size} updates; give 1 or more")

    def at(step: int) -> float:
        sizes_done = (step + 1) / size
        if by_steps:
            sizes_done = math.floor(sizes_done)
        return lowest * (1 + rate * sizes_done)

    return at


def one_cycle(
    sizes: tuple[float, float], stairs: tuple[int, int], start: float, top: float, *, rests: Callable[[float], float]
) -> Callable[[int], float]:
    """Return the function of the update's number that rises from `start` to `top` and falls back.

    It rises in `sizes[0]` updates and falls in `sizes[1]`; afterwards it is `rests`(updates since).
    """
    first, second = sizes
    if min(first, second) < 1:
        raise ConfigError(
            f"a cycle rises for {first} updates and then falls for {second}; each number must be 1 or more"
        )

    def at(step: int) -> float:
        if step >= first + second:
            return rests(step - (first + second) + 1)
        updates = (step + 1) % (first + second)
        if updates <= first:
            size = first
            count = stairs[0]
        else:
            size = second
            count = stairs[1]
            updates = first + second - updates  # until the end
        share = updates / size
        if count:
            share = math.floor(updates * count / size) / count
        return start + (top - start) * share

    return at
