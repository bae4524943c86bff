"""Rates by number of updates, rates and decays by samples, written into the groups of an optimizer: for a loop of
one's own."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from megatron.core.base.dataclass_flags import ConfigError
from megatron.core.optimizer.lr_schedule import (
    LearningRateConfig,
    LearningRateSchedule,
    WeightDecaySchedule,
    schedule_in_force,
)


class GroupSchedule:
    """Writes `lr` into every group of an optimizer: once when it is made, which the first update reads, and after every
    update.

    rates: a function of the update's number, from -1, for each group. betas: likewise Adam's of all groups.
    """

    def __init__(
        self,
        optimizer: Any,
        rates: Sequence[Callable[[int], float]],
        last_batch_iteration: int = -1,
        *,
        betas: Callable[[int], tuple[float, float]] | None = None,
    ):
        self.optimizer, self._rates = optimizer, list(rates)
        self._betas = betas
        self.step(last_batch_iteration)

    def step(self, last_batch_iteration: int | None = None) -> None:
        """One update is done; last_batch_iteration: its number, by default the next."""
        following = self.last_batch_iteration + 1 if last_batch_iteration is None else last_batch_iteration
        self.last_batch_iteration = following
        for group, rate in zip(self.optimizer.param_groups, self.get_last_lr()):
            group["lr"] = rate
            if self._betas is not None:
                group["betas"] = self._betas(following)

    def get_last_lr(self) -> list[float]:
        """The rate of each group in the next update."""
        return [rate(self.last_batch_iteration) for rate in self._rates]

    get_lr = get_last_lr

    def state_dict(self) -> dict[str, int]:
        return {"last_batch_iteration": self.last_batch_iteration}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        self.step(int(state["last_batch_iteration"]))


class SampleSchedule:
    """Writes `lr` and `weight_decay` into the groups of an optimizer. The unit of a step is the caller's: samples, in a run.

    A group may have its own `max_lr` and `min_lr`, and factors `lr_mult` and `wd_mult`.
    """

    def __init__(self, optimizer: Any, rate: LearningRateSchedule, decay: WeightDecaySchedule):
        self.optimizer, self.num_steps = optimizer, 0
        self.rate, self.decay = rate, decay
        self.step(0)

    def get_lr(self, param_group: Mapping[str, Any]) -> float:
        ends = {"lr": param_group.get("max_lr"), "min_lr": param_group.get("min_lr")}
        given = {name: value for name, value in ends.items() if value is not None}
        return replace(self.rate, **given).at(self.num_steps)

    def get_wd(self) -> float:
        return self.decay.at(self.num_steps)

    def step(self, increment: int) -> None:
        self.num_steps += increment
        for group in self.optimizer.param_groups:
            group["lr"] = self.get_lr(group) * group.get("lr_mult", 1.0)
            group["weight_decay"] = self.get_wd() * group.get("wd_mult", 1.0)

    def state_dict(self) -> dict[str, Any]:
        return {"num_steps": self.num_steps, "rate": asdict(self.rate), "decay": asdict(self.decay)}

    def resume(self, state: Mapping[str, Any], config: LearningRateConfig) -> None:
        """Go on where the saved one was. Raises ConfigError if it was another schedule and no option of `config` says which
        of them counts."""
        steps = state["num_steps"]
        self.rate = schedule_in_force(self.rate, state["rate"], config, what="learning rate", samples=steps)
        self.decay = schedule_in_force(self.decay, state["decay"], config, what="weight decay", samples=steps)
        self.num_steps = 0
        self.step(steps)


def range_test(lowest: float, size: int, rate: float, *, by_steps: bool = False) -> Callable[[int], float]:
    """`lowest` x (1 + rate x updates / size), the quotient cut to whole steps if `by_steps`."""
    if size < 1:
        raise ConfigError(f"a range test of {size} updates a step; give 1 or more")

    def at(step: int) -> float:
        done = (step + 1) / size
        return lowest * (1 + rate * (math.floor(done) if by_steps else done))

    return at


def one_cycle(
    sizes: tuple[float, float], stairs: tuple[int, int], start: float, top: float, *, rests: Callable[[float], float]
) -> Callable[[int], float]:
    """From `start` to `top` in `sizes[0]` updates and back in `sizes[1]`, each half in so many stairs (0: none), as a
    function of
    the update's number; then `rests`(updates since)."""
    first, second = sizes
    if min(first, second) < 1:
        raise ConfigError(f"a cycle of {first} updates up and {second} down; give 1 or more of each")

    def at(step: int) -> float:
        if step >= first + second:
            return rests(step - (first + second) + 1)
        done = (step + 1) % (first + second)
        half = done > first
        here, count = first + second - done if half else done, stairs[half]
        risen = math.floor(here * count / sizes[half]) / count if count else here / sizes[half]
        return start + (top - start) * risen

    return at
