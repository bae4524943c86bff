"""A check that all ranks of a data-parallel group use the model in one order (ZeRO stages 2 and 3).

Each rank has a shard of every parameter and gradient sum. If a branch on data takes one rank to another layer, it
gathers another layer than the other ranks. They hang, or, with layers of equal size, compute wrong numbers silently.

    always                       the calls of a step are compared once, before its update, in two integers
    --poison-released-buffers    each call is compared before it is made, so that no rank waits on a mismatch; 0.1 to
                                 0.2 ms per call between processes on a CPU
"""

from dataclasses import replace

import torch

from megatron.core.base.label_allocations_by_memory_kind import memory_kind
from megatron.core.parallel import collectives
from megatron.core.parallel.collectives import Ledger
from megatron.core.parallel.rank_grid import Axis

_END = "is at the end of the step"


class DifferentOrderError(RuntimeError):
    """The ranks of a data-parallel group have reached different parts of the model. The message names them."""


class CollectiveOrderCheck:
    """The calls of one model chunk over `axis`.

    at_once: compare each call before it is made, otherwise all at the end of a step.
    """

    def __init__(self, axis: Axis, device: torch.device | str, *, at_once: bool):
        # The check has a ledger of its own, since its traffic is no part of a layout's.
        self._axis = replace(axis, name=f"{axis.name} (order)", ledger=Ledger(keep=1))
        self._device = device
        self._at_once = at_once
        self._calls: list[str] = []

    def record(self, call: str) -> None:
        """Record that this rank is about to make `call`, such as `gathers the parameters of ..`.

        With `at_once` every rank of the axis must call; raises DifferentOrderError if another rank makes another call.
        """
        if self._axis.size == 1:
            return
        if self._at_once:
            self._compare([call])
        else:
            self._calls.append(call)

    def end(self) -> None:
        """End the step's calls and compare them. Every rank must call. Raises DifferentOrderError on all of them."""
        calls = self._calls
        self._calls = []
        if self._axis.size > 1:
            self._compare([*calls, _END])

    def forget(self) -> None:
        """Drop the calls of the last step, which may have ended in an error."""
        self._calls = []

    @memory_kind("communication")
    def _compare(self, calls: list[str]) -> None:
        # One all-reduce finds the largest and the smallest hash: max(hash) and max(-hash) = -min(hash).
        own_hash = collectives.fingerprint("\0".join(calls))
        extremes = torch.tensor([own_hash, -own_hash], dtype=torch.int64, device=self._device)  # [2]
        largest, negated_smallest = collectives.all_reduce(extremes, self._axis, "max").tolist()
        if largest == -negated_smallest:
            return
        # They differ: only now the texts are sent, for the message.
        texts = collectives.all_gather_texts("\0".join(calls), self._axis, self._device)
        raise DifferentOrderError(difference([text.split("\0") for text in texts], self._axis.ranks))


def difference(calls: list[list[str]], ranks: tuple[int, ...]) -> str:
    """Describe the first difference between these ranks' lists of calls. All lists end with the same call."""
    longest = max(len(rank_calls) for rank_calls in calls)
    position = 0  # of the first call that differs
    while position < longest and len({tuple(rank_calls[: position + 1]) for rank_calls in calls}) == 1:
        position += 1
    assert position < longest, "these lists of calls are equal"

    ranks_by_call: dict[str, list[int]] = {}
    for rank, rank_calls in zip(ranks, calls):
        call = rank_calls[min(position, len(rank_calls) - 1)]
        ranks_by_call.setdefault(call, []).append(rank)
    where = "; ".join(f"rank {', '.join(map(str, same))} {call}" for call, same in ranks_by_call.items())
    return (
        f"data-parallel ranks use different parts of the model at one time: {where}. In ZeRO stages 2 and 3 each rank holds a "
        "shard of every layer, so all ranks must use the same layers in the same order; let every rank run all of "
        "them (times zero where it needs none), or use --zero-stage 1, which requires no order"
    )
