"""A slow rank is found by the seconds of a step in which each rank was busy and did not wait for others.

    busy = seconds of the step - seconds inside collectives and transfers

Ranks that wait for each other take equally long. They differ in how long each waits: a slow rank waits least.
"""

import statistics
from collections.abc import Sequence

import torch

from megatron.core.base import rank_status
from megatron.core.parallel import collectives
from megatron.core.parallel.rank_grid import Axis


class StragglerDetector:
    """Measure the busy seconds of this rank since the last report."""

    def __init__(self, world: Axis, device: torch.device | str, shown: int):
        """shown: ranks that are listed as the slowest, and as the fastest."""
        self._world = world
        self._device = device
        self._shown = shown
        self._busy = 0.0  # seconds
        self._steps = 0
        self._waited_before = rank_status.seconds_in_collectives()

    def begin_step(self) -> None:
        self._waited_before = rank_status.seconds_in_collectives()

    def end_step(self, seconds: float) -> None:
        """End a step that took `seconds`."""
        waited = rank_status.seconds_in_collectives() - self._waited_before
        self._busy += seconds - waited
        self._steps += 1

    def line(self) -> str:
        """Return the report on the steps since the last one. Every rank must call; one all-gather of a number."""
        milliseconds = 1000 * self._busy / max(self._steps, 1)
        self._busy = 0.0
        self._steps = 0
        local = torch.tensor([milliseconds], dtype=torch.float32, device=self._device)  # [1]
        busy = collectives.all_gather(local, self._world)  # [world]
        return straggler_line(busy.tolist(), self._shown)


def straggler_line(busy: Sequence[float], shown: int) -> str:
    """Return a line with the slowest and the fastest ranks. busy: milliseconds a step, by rank."""
    slowest_first = sorted(range(len(busy)), key=lambda rank: -busy[rank])
    fastest_first = slowest_first[::-1]
    slowest = ", ".join(f"rank {rank} {busy[rank]:.1f}" for rank in slowest_first[:shown])
    fastest = ", ".join(f"rank {rank} {busy[rank]:.1f}" for rank in fastest_first[:shown])
    median = statistics.median(busy)
    ratio = f", {busy[slowest_first[0]] / median:.2f} times the median" if median > 0 else ""
    return f"   busy ms a step, without waiting: slowest {slowest}{ratio}; median {median:.1f}; fastest {fastest}"
