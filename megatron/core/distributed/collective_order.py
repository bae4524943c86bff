"""A check that all ranks of a data-parallel group use the model in one order (ZeRO stages 2 and 3).

Each rank holds a shard of every parameter and sum. If a branch on data takes one rank to another layer, it gathers
another layer than the other ranks. They hang, or, with layers of equal size, compute wrong numbers silently.

    always                       the calls of a step are compared once, before its update, in two integers
    --poison-released-buffers    each call is compared before it is made, so that no rank waits on a mismatch; 0.1 to
                                 0.2 ms per call between processes on a CPU
"""

from dataclasses import replace

import torch

from megatron.core.base.memory_category import memory_kind
from megatron.core.parallel import collectives
from megatron.core.parallel.collectives import Ledger
from megatron.core.parallel.grid import Axis

_END = "is at the end of the step"


class DifferentOrderError(RuntimeError):
    """The ranks of a data-parallel group have reached different parts of the model. The message names them."""


class UseOrder:
    """The calls of one model chunk over `axis`. at_once: compare each call before it is made, otherwise all at the end
    of a step."""

    def __init__(self, axis: Axis, device: torch.device | str, *, at_once: bool):
        # The check has a ledger of its own, since its traffic is no part of a layout's.
        self._axis = replace(axis, name=f"{axis.name} (order)", ledger=Ledger(keep=1))
        self._device, self._at_once = device, at_once
        self._calls: list[str] = []

    def comes(self, call: str) -> None:
        """Note that this rank is about to make `call`, such as `gathers the parameters of ..`. Raises
        DifferentOrderError with `at_once` if another rank makes another call."""
        if self._axis.size == 1:
            return
        if self._at_once:
            self._compare([call])
        else:
            self._calls.append(call)

    def end(self) -> None:
        """End the step's calls and compare them. Every rank must call. Raises DifferentOrderError on all of them."""
        calls, self._calls = self._calls, []
        if self._axis.size > 1:
            self._compare([*calls, _END])

    def forget(self) -> None:
        """Drop the calls of the last step, which may have ended in an error."""
        self._calls = []

    @memory_kind("communication")
    def _compare(self, calls: list[str]) -> None:
        mine = collectives.fingerprint("\0".join(calls))
        ends = torch.tensor([mine, -mine], dtype=torch.int64, device=self._device)
        most, least = collectives.all_reduce(ends, self._axis, "max").tolist()
        if most == -least:
            return
        texts = collectives.all_gather_texts("\0".join(calls), self._axis, self._device)
        raise DifferentOrderError(difference([text.split("\0") for text in texts], self._axis.ranks))


def difference(calls: list[list[str]], ranks: tuple[int, ...]) -> str:
    """The first difference between these ranks' lists of calls, in words. All lists end with the same call."""
    at = next(i for i in range(max(map(len, calls))) if len({tuple(mine[: i + 1]) for mine in calls}) > 1)
    ranks_at: dict[str, list[int]] = {}
    for rank, mine in zip(ranks, calls):
        ranks_at.setdefault(mine[min(at, len(mine) - 1)], []).append(rank)
    where = "; ".join(f"rank {', '.join(map(str, held))} {call}" for call, held in ranks_at.items())
    return (
        f"data-parallel ranks use different parts of the model at one time: {where}. In ZeRO stages 2 and 3 each rank holds a "
        "shard of every layer, so all ranks must use the same layers in the same order; let every rank run all of "
        "them (times "
        "zero where it needs none), or use --zero-stage 1, which requires no order"
    )
