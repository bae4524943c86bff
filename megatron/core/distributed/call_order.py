"""Whether the ranks that share a model in shards use its parts in one order (ZeRO stages 2 and 3).

Each of them has a part of everyone's parameters and sums. So a rank whose forward takes another branch than the
others', as a branch on data may, would gather another layer than they do: a wait for ever, or, of layers of one size,
wrong numbers without a word.

    always                       the calls of a step are compared once, before its update: two integers travel
    --poison-released-buffers    each call is compared before it is made, so that ranks do not wait for one another first
                                 where layers differ in size or number; ranks then run in step, 0.1 to 0.2 ms a call
                                 between processes on a CPU
"""

from dataclasses import replace

import torch

from megatron.core import comm
from megatron.core.comm import Ledger
from megatron.core.grid import Axis

_END = "is at the end of the step"


class DifferentOrderError(RuntimeError):
    """The ranks of a data-parallel group have come to different parts of the model: who is where."""


class UseOrder:
    """The calls of one model chunk over `axis`. at_once: compare each before it is made, else all of a step at its
    end."""

    def __init__(self, axis: Axis, device: torch.device | str, *, at_once: bool):
        # What this sends belongs to no layout's traffic, so it has a ledger of its own.
        self._axis = replace(axis, name=f"{axis.name} (order)", ledger=Ledger(keep=1))
        self._device, self._at_once = device, at_once
        self._calls: list[str] = []

    def comes(self, call: str) -> None:
        """This rank is about to make `call`, `gathers the parameters of ..`. Raises DifferentOrderError if others come
        with another."""
        if self._axis.size == 1:
            return
        if self._at_once:
            self._compare([call])
        else:
            self._calls.append(call)

    def end(self) -> None:
        """The step has no more calls. Every rank must call. Raises DifferentOrderError on all of them."""
        calls, self._calls = self._calls, []
        if self._axis.size > 1:
            self._compare([*calls, _END])

    def forget(self) -> None:
        """Before a step, perhaps after one that an error ended."""
        self._calls = []

    def _compare(self, calls: list[str]) -> None:
        mine = comm.fingerprint("\0".join(calls))
        ends = torch.tensor([mine, -mine], dtype=torch.int64, device=self._device)
        most, least = comm.all_reduce(ends, self._axis, "max").tolist()
        if most == -least:
            return
        texts = comm.all_gather_texts("\0".join(calls), self._axis, self._device)
        raise DifferentOrderError(difference([text.split("\0") for text in texts], self._axis.ranks))


def difference(calls: list[list[str]], ranks: tuple[int, ...]) -> str:
    """Where the lists of these ranks part, in words. All end with the same call."""
    at = next(i for i in range(max(map(len, calls))) if len({tuple(mine[: i + 1]) for mine in calls}) > 1)
    ranks_at: dict[str, list[int]] = {}
    for rank, mine in zip(ranks, calls):
        ranks_at.setdefault(mine[min(at, len(mine) - 1)], []).append(rank)
    where = "; ".join(f"rank {', '.join(map(str, held))} {call}" for call, held in ranks_at.items())
    return (
        f"data-parallel ranks use different parts of the model at one time: {where}. In ZeRO stages 2 and 3 each rank of such "
        "a group has a part of everything, so all must use the same layers in the same order, whatever their data; let every "
        "rank pass through all of them (times zero where it needs none), or use --zero-stage 1, which asks for no order"
    )
