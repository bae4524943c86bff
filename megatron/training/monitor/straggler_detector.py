"""Which rank is slow: seconds of a step that each rank was busy, without those in which it waited for others.

    busy = seconds of the step - seconds inside collectives and transfers

Ranks that wait for each other take equally long; what tells them apart is how long each waits. A slow rank waits least.
"""

import statistics
from collections.abc import Sequence

import torch

from megatron.core.base import rank_status
from megatron.core.parallel import collectives
from megatron.core.parallel.grid import Axis


class Stragglers:
    """The busy seconds of this rank since the last report."""

    def __init__(self, world: Axis, device: torch.device | str, shown: int):
        """shown: ranks that are listed as the slowest, and as the fastest."""
        self._world, self._device = world, device
        self._shown = shown
        self._busy, self._steps = 0.0, 0
        self._waited = rank_status.seconds_waited()

    def begin_step(self) -> None:
        self._waited = rank_status.seconds_waited()

    def end_step(self, seconds: float) -> None:
        self._busy += seconds - (rank_status.seconds_waited() - self._waited)
        self._steps += 1

    def line(self) -> str:
        """The report on the steps since the last one. Every rank must call; one all-gather of a number."""
        mine = torch.tensor([1000 * self._busy / max(self._steps, 1)], dtype=torch.float32, device=self._device)
        self._busy, self._steps = 0.0, 0
        return straggler_line(collectives.all_gather(mine, self._world).tolist(), self._shown)


def straggler_line(busy: Sequence[float], shown: int) -> str:
    """The slowest and the fastest ranks, by busy milliseconds a step."""
    order = sorted(range(len(busy)), key=lambda rank: -busy[rank])
    slowest, fastest = (
        ", ".join(f"rank {rank} {busy[rank]:.1f}" for rank in some)
        for some in (order[:shown], order[: -shown - 1 : -1])
    )
    middle = statistics.median(busy)
    ratio = f", {busy[order[0]] / middle:.2f} times the median" if middle > 0 else ""
    return f"   busy ms a step, without waiting: slowest {slowest}{ratio}; median {middle:.1f}; fastest {fastest}"
