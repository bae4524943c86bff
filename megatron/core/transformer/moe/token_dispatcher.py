"""How tokens reach their experts on other ranks, and how the results come back.

    alltoall    each row (token, expert) is sent to the ranks of its expert
                rows by expert -> all-to-all -> (rank, expert) rows -> experts -> all-to-all -> rows by expert -> sums
    allgather   every rank receives all tokens, takes those of its experts, and the sums of results are scattered

Both send over "ep_etp": a rank of etp has a part of the hidden features of an expert, so a row goes to all ranks of its expert, and
their results are added. Weights stay where the token is. Every rank of ep_etp must call, forward and backward, also one
without rows.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron.core.ops.overridable_by_torch_function_mode import row_counts
from megatron.core.parallel import collectives
from megatron.core.parallel.rank_grid import Axis
from megatron.core.tensor_parallel import autograd_collectives
from megatron.core.transformer.layer_build_context import ExpertParallel
from megatron.core.transformer.moe.moe_utils import chunk_order, order_by_expert


class ExpertRows(NamedTuple):
    """The rows that this rank's experts compute: x [rows, h], by expert; counts: the rows of each."""

    x: Tensor
    counts: tuple[int, ...]


class MoEAlltoAllTokenDispatcher:
    """Send each token to its experts. One object serves one forward.

    start(tokens [T, h], ids [T, K], kept [T, K]) begins to send. wait() -> the rows of this rank's experts. combine(results
    [rows, h]) -> the results of each token [T, K, h], 0 where a choice was dropped.
    """

    def __init__(self, num_experts: int, ranks: ExpertParallel):
        self.num_experts = num_experts
        self.ranks = ranks

    def start(self, tokens: Tensor, ids: Tensor, kept: Tensor | None) -> None:
        everyone = self.ranks.ep_etp
        parts = self.ranks.etp.size
        local = self.num_experts // self.ranks.ep.size  # experts of a rank
        k = ids.shape[1]
        self.order, self.place, counts = order_by_expert(ids, kept, self.num_experts)

        # how many rows go where; each goes to all ranks that have a part of its expert
        if everyone.size == 1:
            self.rows_of_expert = row_counts(counts, ids.numel())
            self.rows = _TokensToRows.apply(tokens, self.order[: sum(self.rows_of_expert)], self.place)
            return
        counts = counts.view(-1, local)  # [ep, local]
        arriving = collectives.all_to_all(counts.repeat_interleave(parts, 0), everyone)  # [ranks, local]
        per_rank = row_counts(counts.sum(1), ids.numel())
        self.sent = [n for n in per_rank for _ in range(parts)]
        self.received = row_counts(arriving, ids.numel() * parts)  # [ranks][local]
        self.received_of_rank = [sum(of_rank) for of_rank in self.received]
        self.rows_of_expert = [sum(of_rank[e] for of_rank in self.received) for e in range(local)]
        del k

        rows = _TokensToRows.apply(tokens, self.order[: sum(per_rank)], self.place)
        if parts > 1:
            rows = torch.cat([part for part in rows.split(per_rank) for _ in range(parts)])
        self.sending = autograd_collectives.StartedAllToAll(rows, everyone, self.sent, self.received_of_rank)

    def wait(self) -> ExpertRows:
        counts = tuple(self.rows_of_expert)
        if self.ranks.ep_etp.size == 1:
            return ExpertRows(self.rows, counts)
        arrived = self.sending.wait()  # by (rank, expert)
        return ExpertRows(torch.cat([arrived[start:stop] for start, stop in chunk_order(self.received)]), counts)

    def combine(self, results: Tensor) -> Tensor:
        everyone = self.ranks.ep_etp
        parts = self.ranks.etp.size
        if everyone.size > 1:
            # from (expert, rank) to (rank, expert), which is what a rank has sent
            by_expert = [[of_rank[e] for of_rank in self.received] for e in range(len(self.rows_of_expert))]
            pieces = [results[start:stop] for start, stop in chunk_order(by_expert)]
            rows = autograd_collectives.all_to_all_v(torch.cat(pieces), everyone, self.received_of_rank, self.sent)
            if parts > 1:
                terms = rows.split(self.sent)
                rows = torch.cat([sum(terms[i + 1 : i + parts], terms[i]) for i in range(0, len(terms), parts)])
            results = rows
        return _RowsToTokens.apply(results, self.order[: len(results)], self.place)


class MoEAllGatherTokenDispatcher:
    """Send every token to every rank. One object serves one forward; for its methods see `MoEAlltoAllTokenDispatcher`.

    The weights are sent too, since results are summed before they come back: `combine` takes the results, weights are an
    argument of `start`, and the result is the sum of each token's experts, [T, h].
    """


class _TokensToRows(torch.autograd.Function):
    """tokens [T, h] -> the row of each choice that is kept, by expert: [rows, h]."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, order: Tensor, place: Tensor) -> Tensor:
        """order: int64 [rows], the choice of each row; place: int64 [T, K], the row of each choice, >= rows if dropped."""
        ctx.save_for_backward(place)
        return tokens[order // place.shape[1]]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """grad: [rows, h] -> [T, h], the sum over the choices of a token in their order. Saved: place."""
        (place,) = ctx.saved_tensors
        return _at(grad, place).sum(1), None, None


class _RowsToTokens(torch.autograd.Function):
    """The row of each choice [rows, h] -> [T, K, h], 0 where a choice was dropped."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor, place: Tensor) -> Tensor:
        ctx.save_for_backward(order)
        return _at(rows, place)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """grad: [T, K, h] -> [rows, h]. Saved: order."""
        (order,) = ctx.saved_tensors
        return grad.flatten(0, 1)[order], None, None


def _at(rows: Tensor, place: Tensor) -> Tensor:
    """Return rows[place], [T, K, h], with zeros for places behind the rows."""
    if rows.shape[0] < place.numel():
        rows = torch.cat((rows, rows.new_zeros(1, *rows.shape[1:])))
        place = place.clamp(max=rows.shape[0] - 1)
    return rows[place]
