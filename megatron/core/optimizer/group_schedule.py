"""Rates by number of updates, written into the groups of an optimizer: for a loop of one's own."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any


class GroupSchedule:
    """Writes `lr` into every group of an optimizer: once when it is made, which the first update reads, and after every update.

    rates: a function of the update's number, from -1, for each group; `LearningRateSchedule.at` is one, of samples.
    """

    def __init__(self, optimizer: Any, rates: Sequence[Callable[[int], float]], last_batch_iteration: int = -1):
        self.optimizer, self._rates = optimizer, list(rates)
        self.step(last_batch_iteration)

    def step(self, last_batch_iteration: int | None = None) -> None:
        """One update is done; last_batch_iteration: its number, by default the next."""
        following = self.last_batch_iteration + 1 if last_batch_iteration is None else last_batch_iteration
        self.last_batch_iteration = following
        for group, rate in zip(self.optimizer.param_groups, self.get_last_lr()):
            group["lr"] = rate

    def get_last_lr(self) -> list[float]:
        """The rate of each group in the next update."""
        return [rate(self.last_batch_iteration) for rate in self._rates]

    get_lr = get_last_lr

    def state_dict(self) -> dict[str, int]:
        return {"last_batch_iteration": self.last_batch_iteration}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        self.step(int(state["last_batch_iteration"]))
