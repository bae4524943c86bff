"""How tokens reach their experts on other ranks, and how the results come back.

    alltoall    each row (token, expert) is sent to the ranks of its expert
                rows by expert -> all-to-all -> (rank, expert) rows -> experts -> all-to-all -> rows by expert -> sums
    allgather   every rank receives all tokens, takes those of its experts, and the sums of results are scattered

Both send over "ep_etp": a rank of etp has a part of the hidden features of an expert, so a row goes to all ranks of its expert,
and their results are added. Weights stay where the token is. Every rank of ep_etp must call, forward and backward, also one
without rows.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron.core.base.lazy_imports import names_of_megatron
from megatron.core.ops.decisions_overridable_for_memory_prediction import row_counts
from megatron.core.parallel import collectives
from megatron.core.tensor_parallel import autograd_collectives
from megatron.core.transformer.layer_parallel_context import ExpertParallel
from megatron.core.transformer.moe.moe_utils import chunk_order, order_by_expert


class ExpertRows(NamedTuple):
    """The rows that this rank's experts compute: x [rows, h], by expert; counts: the rows of each."""

    x: Tensor
    counts: tuple[int, ...]


class TokenDispatcher:
    """Takes tokens to their experts and back. One object serves one forward.

    start(tokens [T, h], ids [T, K], weights [T, K], kept bool [T, K] or None: all) begins to send. wait() -> the rows of this
    rank's experts. combine(results [rows, h]) -> [T, h], the sum of each token's results times weights.
    """

    def __init__(self, num_experts: int, ranks: ExpertParallel):
        self.num_experts = num_experts
        self.ranks = ranks
        self.local = num_experts // ranks.ep.size  # experts of a rank

    def start(self, tokens: Tensor, ids: Tensor, weights: Tensor, kept: Tensor | None) -> None:
        raise NotImplementedError

    def wait(self) -> ExpertRows:
        raise NotImplementedError

    def combine(self, results: Tensor) -> Tensor:
        raise NotImplementedError


class AllToAllDispatcher(TokenDispatcher):
    """Send each row to the ranks of its expert. For the methods see `TokenDispatcher`."""

    def start(self, tokens: Tensor, ids: Tensor, weights: Tensor, kept: Tensor | None) -> None:
        everyone = self.ranks.ep_etp
        parts = self.ranks.etp.size
        order, self.place, counts = order_by_expert(ids, kept, self.num_experts)
        self.weights = weights
        if everyone.size == 1:
            self.counts = row_counts(counts, ids.numel())
            self.order = order[: sum(self.counts)]
            self.rows = TokensToRows.apply(tokens, self.order, self.place)
            return

        # how many rows go where; each goes to all ranks that have a part of its expert
        counts = counts.view(-1, self.local)  # [ep, local]
        arriving = collectives.all_to_all(counts.repeat_interleave(parts, 0), everyone)  # [ranks, local]
        self.per_share = row_counts(counts.sum(1), ids.numel())  # rows to each rank of ep
        self.sent = [n for n in self.per_share for _ in range(parts)]
        self.received = row_counts(arriving, ids.numel() * parts)  # [ranks][local]
        self.received_of_rank = [sum(of_rank) for of_rank in self.received]
        self.counts = [sum(of_rank[e] for of_rank in self.received) for e in range(self.local)]

        self.order = order[: sum(self.per_share)]
        rows = TokensToRows.apply(tokens, self.order, self.place)
        if parts > 1:
            rows = torch.cat([part for part in rows.split(self.per_share) for _ in range(parts)])
        self.sending = autograd_collectives.StartedAllToAll(rows, everyone, self.sent, self.received_of_rank)

    def wait(self) -> ExpertRows:
        if self.ranks.ep_etp.size == 1:
            return ExpertRows(self.rows, tuple(self.counts))
        arrived = self.sending.wait()  # by (rank, expert)
        chunks = chunk_order(self.received)
        return ExpertRows(torch.cat([arrived[start:stop] for start, stop in chunks]), tuple(self.counts))

    def combine(self, results: Tensor) -> Tensor:
        everyone = self.ranks.ep_etp
        parts = self.ranks.etp.size
        rows = results
        if everyone.size > 1:
            # from (expert, rank) to (rank, expert), as they came
            by_expert = [[of_rank[e] for of_rank in self.received] for e in range(self.local)]
            rows = torch.cat([results[start:stop] for start, stop in chunk_order(by_expert)])
            rows = autograd_collectives.all_to_all_v(rows, everyone, self.received_of_rank, self.sent)
        if parts > 1:  # the sum of the terms of an expert's ranks
            terms = rows.split(self.sent)
            rows = torch.cat([sum(terms[i + 1 : i + parts], terms[i]) for i in range(0, len(terms), parts)])
        return RowsToTokens.apply(rows, self.weights, self.order, self.place)


class AllGatherDispatcher(TokenDispatcher):
    """Give every rank all tokens, and sum the results where the tokens are. For the methods see `TokenDispatcher`."""

    def start(self, tokens: Tensor, ids: Tensor, weights: Tensor, kept: Tensor | None) -> None:
        everyone = self.ranks.ep_etp
        first = self.ranks.ep.rank * self.local
        tokens = autograd_collectives.gather_sequence(tokens, everyone)  # [ranks T, h]
        self.weights = autograd_collectives.gather_sequence(weights, everyone)  # [ranks T, K]
        if kept is not None:
            ids = torch.where(kept, ids, -1)
        ids = collectives.all_gather(ids, everyone) - first
        is_here = (ids >= 0) & (ids < self.local)
        order, self.place, counts = order_by_expert(ids, is_here, self.local)
        self.counts = row_counts(counts, ids.numel() // self.ranks.ep.size)
        self.order = order[: sum(self.counts)]
        self.rows = TokensToRows.apply(tokens, self.order, self.place)

    def wait(self) -> ExpertRows:
        return ExpertRows(self.rows, tuple(self.counts))

    def combine(self, results: Tensor) -> Tensor:
        terms = RowsToTokens.apply(results, self.weights, self.order, self.place)  # [ranks T, h]
        return autograd_collectives.reduce_scatter_sequence(terms, self.ranks.ep_etp)


DISPATCHERS = {"alltoall": AllToAllDispatcher, "allgather": AllGatherDispatcher}


class TokensToRows(torch.autograd.Function):
    """tokens [T, h] -> the row of each choice that is kept, by expert: [rows, h]."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, order: Tensor, place: Tensor) -> Tensor:
        """order: int64 [rows], the choice of each row; place: int64 [T, K], the row of each choice, >= rows if dropped."""
        ctx.save_for_backward(place)
        return tokens.index_select(0, order // place.shape[1])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """grad: [rows, h] -> [T, h], the sum over the choices of a token in their order. Saved: place."""
        (place,) = ctx.saved_tensors
        grad, place = _with_zeros(grad, place)
        total = grad.index_select(0, place[:, 0])
        for column in place.unbind(1)[1:]:
            total += grad.index_select(0, column)
        return total, None, None


class RowsToTokens(torch.autograd.Function):
    """rows [rows, h], weights [T, K] -> [T, h], the sum of each token's rows times weights, in the order of its choices.

    In the dtype of the weights if it is wider, and rounded once.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weights: Tensor, order: Tensor, place: Tensor) -> Tensor:
        """order, place: see `TokensToRows`."""
        ctx.save_for_backward(rows, weights, order)
        dtype = torch.promote_types(rows.dtype, weights.dtype)
        values, place = _with_zeros(rows, place)
        factors = weights.to(dtype)
        total = values.index_select(0, place[:, 0]).to(dtype) * factors[:, :1]
        for j in range(1, place.shape[1]):
            total.addcmul_(values.index_select(0, place[:, j]).to(dtype), factors[:, j : j + 1])
        return total.to(rows.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """grad: [T, h] -> the gradients of rows and weights. Saved: both, and order."""
        rows, weights, order = ctx.saved_tensors
        dtype = torch.promote_types(rows.dtype, weights.dtype)
        of_rows = grad.index_select(0, order // weights.shape[1]).to(dtype)  # [rows, h]
        grad_weights = None
        if ctx.needs_input_grad[1]:
            products = (of_rows * rows).sum(-1)  # [rows]
            grad_weights = products.new_zeros(weights.numel()).index_copy_(0, order, products).view(weights.shape)
            grad_weights = grad_weights.to(weights.dtype)
        grad_rows = of_rows.mul_(weights.flatten()[order].unsqueeze(-1)).to(rows.dtype)
        return grad_rows, grad_weights, None, None


def _with_zeros(rows: Tensor, place: Tensor) -> tuple[Tensor, Tensor]:
    """Return rows with one of zeros behind them, and places that lead there where a choice was dropped."""
    if rows.shape[0] == place.numel():
        return rows, place
    return torch.cat((rows, rows.new_zeros(1, *rows.shape[1:]))), place.clamp(max=rows.shape[0])


__getattr__ = names_of_megatron(__name__)
