"""How tokens reach their experts on other ranks, and how the results come back.

    alltoall    each row (token, expert) is sent to the ranks of its expert
                rows by expert -> all-to-all -> rows by (rank, expert) -> experts -> all-to-all -> rows by expert -> sums
    allgather   every rank receives all tokens, takes those of its experts, and the sums of results are scattered

Both send over "ep_etp": a rank of etp has a part of the hidden features of an expert, so a row goes to all ranks of its expert,
and their results are added. Weights stay where the token is. Every rank of ep_etp must call, forward and backward, also one
without rows.
"""

from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from megatron.core.base.lazy_imports import names_of_megatron
from megatron.core.ops.decisions_overridable_for_memory_prediction import row_counts
from megatron.core.parallel import collectives
from megatron.core.tensor_parallel import autograd_collectives
from megatron.core.transformer.layer_parallel_context import ExpertParallel
from megatron.core.transformer.moe.moe_utils import order_by_expert


class WgradParts:
    """What the weight gradients of several calls of the experts are computed from, until the backward has seen all calls.

    Each gradient is then computed at once: the products of one expert follow each other, while its gradient is in the cache.
    And no rank waits for rows because another computes weight gradients first.
    """

    def __init__(self, calls: int):
        self.calls = calls
        self._parts: defaultdict[Hashable, list[Any]] = defaultdict(list)

    def add(self, weight: Tensor, part: Any) -> list[Any]:
        """Keep what one call has for the gradient of `weight`, of any shape. Return all, in order, with the last; else []."""
        parts = self._parts[weight]
        parts.append(part)
        return self._parts.pop(weight) if len(parts) == self.calls else []


class ExpertRows(NamedTuple):
    """Rows that this rank's experts compute: x [rows, h], by expert; counts: the rows of each.

    wgrad_parts: of the calls that take parts of the rows; None: this call takes all.
    """

    x: Tensor
    counts: tuple[int, ...]
    wgrad_parts: WgradParts | None = None


Experts = Callable[[ExpertRows], Tensor]  # -> results [rows, h]


class TokenDispatcher:
    """Takes tokens to their experts and back. One object serves one forward.

    start(tokens [T, h], ids [T, K], weights [T, K], kept bool [T, K] or None: all) begins to send. finish(experts) computes
    the rows that are for this rank's experts, and returns [T, h]: the sum of each token's results times weights.
    """

    def __init__(self, num_experts: int, ranks: ExpertParallel):
        self.num_experts = num_experts
        self.ranks = ranks
        self.local = num_experts // ranks.ep.size  # experts of a rank

    def start(self, tokens: Tensor, ids: Tensor, weights: Tensor, kept: Tensor | None) -> None:
        raise NotImplementedError

    def finish(self, experts: Experts) -> Tensor:
        raise NotImplementedError


class AllToAllDispatcher(TokenDispatcher):
    """Send each row to the ranks of its expert. For the methods see `TokenDispatcher`.

    A rank's own rows do not travel. It computes those of the first half of its experts while the others come, and
    those of the second half while the others' results go back; in the backward the other way around:

        send rows ............ wait         send results ............. wait
                  own, first half   others'              own, second half

    The weight gradients of all come last in the backward, while the gradients of others' rows go back.
    """

    @property
    def half(self) -> int:
        """The number of experts in the first half; a second half without any is left out."""
        return (self.local + 1) // 2

    def start(self, tokens: Tensor, ids: Tensor, weights: Tensor, kept: Tensor | None) -> None:
        ep, etp, ep_etp = self.ranks.ep, self.ranks.etp, self.ranks.ep_etp
        order, self.place, counts = order_by_expert(ids, kept, self.num_experts)
        self.weights = weights
        if ep_etp.size == 1:
            self.own_counts = row_counts(counts, ids.numel())
            self.order = order[: sum(self.own_counts)]
            _, self.own = TokensToRows.apply(tokens, self.order, self.place, (0, len(self.order)))
            return

        # how many rows go where; each goes to all ranks that have a part of its expert
        counts = counts.view(ep.size, self.local)
        arriving = collectives.start_all_to_all(counts.repeat_interleave(etp.size, 0), ep_etp)  # [ranks, local]
        sent_counts = row_counts(counts, ids.numel())  # [ep][local]
        self.own_counts = sent_counts[ep.rank]
        self.rows_to_ep = [sum(of_rank) for of_rank in sent_counts]  # [ep]
        self.start_of_own = sum(self.rows_to_ep[: ep.rank])
        bounds = [self.start_of_own, self.start_of_own + self.rows_to_ep[ep.rank]]
        if self.half < self.local:
            bounds.insert(1, self.start_of_own + sum(self.own_counts[: self.half]))
        self.order = order[: sum(self.rows_to_ep)]
        others, *self.own_parts = TokensToRows.apply(tokens, self.order, self.place, bounds)
        self.received_counts = row_counts(arriving.wait(), ids.numel() * etp.size)  # [ranks][local]
        self.received_counts[ep_etp.rank] = [0] * self.local  # own rows do not travel

        # the rows: `input_splits` and `output_splits` of torch's all_to_all_single
        self.output_splits = [sum(of_rank) for of_rank in self.received_counts]
        self.input_splits = [rows for rows in self.rows_to_ep for _ in range(etp.size)]
        self.input_splits[ep_etp.rank] = 0
        self.sending = autograd_collectives.StartedAllToAll(
            self.rows_to_send(others), ep_etp, self.input_splits, self.output_splits
        )

    def rows_to_send(self, others: Tensor) -> Tensor:
        """Return the rows for all other ranks, in their order. others: [rows, h], for the experts of other ranks of ep."""
        ep, etp = self.ranks.ep, self.ranks.etp
        if etp.size == 1:
            return others
        rows_of_ep = list(others.split(self.rows_to_ep[: ep.rank] + self.rows_to_ep[ep.rank + 1 :]))
        copies = [etp.size] * len(rows_of_ep)
        rows_of_ep.insert(ep.rank, torch.cat(self.own_parts))
        copies.insert(ep.rank, etp.size - 1)  # to the ranks that have the other parts of this rank's experts
        return torch.cat([rows for rows, n in zip(rows_of_ep, copies) for _ in range(n)])

    def finish(self, experts: Experts) -> Tensor:
        etp, ep_etp = self.ranks.etp, self.ranks.ep_etp
        if ep_etp.size == 1:
            results = experts(ExpertRows(self.own, tuple(self.own_counts)))
            return RowsToTokens.apply(self.weights, self.order, self.place, 0, None, results)

        # own rows of the first half of the experts, while the others' rows come
        half = self.half
        no_rows = [0] * self.local
        # the number of calls is equal on every rank, whichever rows there are: modules that gather weights need that
        wgrad_parts = WgradParts(calls=1 + len(self.own_parts))
        first_counts = (*self.own_counts[:half], *no_rows[half:])
        own_results = [experts(ExpertRows(self.own_parts[0], first_counts, wgrad_parts))]

        # the others' rows come by (rank, expert); experts take them by (expert, rank)
        by_expert = list(zip(*self.received_counts))  # [local][ranks]
        rows = transpose_chunks(self.sending.wait(), self.received_counts)
        results = experts(ExpertRows(rows, tuple(map(sum, by_expert)), wgrad_parts))
        results = transpose_chunks(results, by_expert)
        returning = autograd_collectives.StartedAllToAll(results, ep_etp, self.output_splits, self.input_splits)

        # own rows of the second half, while the others' results go back
        if half < self.local:
            second_counts = (*no_rows[:half], *self.own_counts[half:])
            own_results.append(experts(ExpertRows(self.own_parts[1], second_counts, wgrad_parts)))
        returned = returning.wait()
        if etp.size == 1:
            return RowsToTokens.apply(self.weights, self.order, self.place, self.start_of_own, returned, *own_results)
        terms = list(returned.split(self.input_splits))  # of each rank: ranks of etp have terms of one sum
        terms[ep_etp.rank] = torch.cat(own_results)
        firsts = range(0, ep_etp.size, etp.size)
        sums = [sum(terms[i + 1 : i + etp.size], terms[i]) for i in firsts]
        return RowsToTokens.apply(self.weights, self.order, self.place, 0, None, *sums)


def transpose_chunks(rows: Tensor, chunks: Sequence[Sequence[int]]) -> Tensor:
    """Return rows [n, h], which are in chunks by (i, j), in the order of (j, i). chunks: [i][j], the rows of each.

    Rows by (rank, expert) become rows by (expert, rank), and back. Megatron: `sort_chunks_by_idxs`.
    """
    m = len(chunks[0])
    sizes = [size for row in chunks for size in row]  # of chunk (i, j) at i m + j
    order = [i * m + j for j in range(m) for i in range(len(chunks))]
    order = [k for k in order if sizes[k]]
    if order == sorted(order):  # nothing moves, so nothing is copied
        return rows
    pieces = rows.split(sizes)
    return torch.cat([pieces[k] for k in order])


class AllGatherDispatcher(TokenDispatcher):
    """Give every rank all tokens, and sum the results where the tokens are. For the methods see `TokenDispatcher`."""

    def start(self, tokens: Tensor, ids: Tensor, weights: Tensor, kept: Tensor | None) -> None:
        ep_etp = self.ranks.ep_etp
        tokens = autograd_collectives.gather_sequence(tokens, ep_etp)  # [ranks T, h]
        self.weights = autograd_collectives.gather_sequence(weights, ep_etp)  # [ranks T, K]
        if kept is not None:
            ids = torch.where(kept, ids, -1)
        ids = collectives.all_gather(ids, ep_etp) - self.ranks.ep.rank * self.local  # 0 is this rank's first expert
        is_here = (ids >= 0) & (ids < self.local)
        order, self.place, counts = order_by_expert(ids, is_here, self.local)
        self.counts = row_counts(counts, ids.numel() // self.ranks.ep.size)
        self.order = order[: sum(self.counts)]
        _, self.rows = TokensToRows.apply(tokens, self.order, self.place, (0, len(self.order)))

    def finish(self, experts: Experts) -> Tensor:
        results = experts(ExpertRows(self.rows, tuple(self.counts)))
        terms = RowsToTokens.apply(self.weights, self.order, self.place, 0, None, results)  # [ranks T, h]
        return autograd_collectives.reduce_scatter_sequence(terms, self.ranks.ep_etp)


# alltoall_seq: Megatron's older all-to-all, which gathers over the tensor-parallel ranks at another point
DISPATCHERS = {"alltoall": AllToAllDispatcher, "alltoall_seq": AllToAllDispatcher, "allgather": AllGatherDispatcher}


class TokensToRows(torch.autograd.Function):
    """tokens [T, h] -> the row of each choice that is kept, by expert: those of other ranks, and parts of own ones, [.., h]."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, order: Tensor, place: Tensor, bounds: Sequence[int]) -> tuple[Tensor, ...]:
        """order: int64 [rows], the choice of each row; place: int64 [T, K], the row of each choice, >= rows if dropped.

        bounds: of the parts of this rank's own rows, which follow each other: the first's start, ..., the last's end.
        """
        ctx.save_for_backward(place)
        ctx.start = bounds[0]
        token = order // place.shape[1]
        others = torch.cat((token[: bounds[0]], token[bounds[-1] :]))
        own = [tokens.index_select(0, token[start:stop]) for start, stop in pairwise(bounds)]
        return tokens.index_select(0, others), *own

    @staticmethod
    def backward(ctx: Any, others: Tensor, *own: Tensor) -> tuple[Tensor | None, ...]:
        """others, own: gradients as in the forward -> [T, h], the sum over the choices of a token in their order.

        Saved: place.
        """
        (place,) = ctx.saved_tensors
        grad, place = _with_zeros(_in_order(others, own, ctx.start), place)
        return functional.embedding_bag(place, grad, mode="sum"), None, None, None


class RowsToTokens(torch.autograd.Function):
    """rows [rows, h], weights [T, K] -> [T, h], the sum of each token's rows times weights, in the order of its choices.

    In the dtype of the weights if it is wider, and rounded once.
    """

    @staticmethod
    def forward(
        ctx: Any, weights: Tensor, order: Tensor, place: Tensor, start: int, others: Tensor | None, *own: Tensor
    ) -> Tensor:
        """order, place: see `TokensToRows`. The rows are parts: own ones [.., h], at `start` among the others [.., h]."""
        rows = _in_order(others, own, start)
        ctx.save_for_backward(rows, weights, order)
        ctx.start = start
        ctx.sizes = [len(part) for part in own]
        dtype = torch.promote_types(rows.dtype, weights.dtype)
        values, place = _with_zeros(rows, place)
        if rows.dtype == weights.dtype:
            return functional.embedding_bag(place, values, per_sample_weights=weights, mode="sum")
        factors = weights.to(dtype)
        total = values.index_select(0, place[:, 0]).to(dtype) * factors[:, :1]
        for j in range(1, place.shape[1]):
            total.addcmul_(values.index_select(0, place[:, j]).to(dtype), factors[:, j : j + 1])
        return total.to(rows.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """grad: [T, h] -> the gradients of weights and of the rows. Saved: both, and order."""
        rows, weights, order = ctx.saved_tensors
        dtype = torch.promote_types(rows.dtype, weights.dtype)
        of_rows = grad.index_select(0, order // weights.shape[1]).to(dtype)  # [rows, h]
        grad_weights = None
        if ctx.needs_input_grad[0]:
            products = (of_rows * rows).sum(-1)  # [rows]
            grad_weights = products.new_zeros(weights.numel()).index_copy_(0, order, products).view(weights.shape)
            grad_weights = grad_weights.to(weights.dtype)
        grad_rows = of_rows.mul_(weights.flatten()[order].unsqueeze(-1)).to(rows.dtype)
        stop = ctx.start + sum(ctx.sizes)
        others = None
        if ctx.needs_input_grad[4]:
            others = _joined((grad_rows[: ctx.start], grad_rows[stop:]))
        return grad_weights, None, None, None, others, *grad_rows[ctx.start : stop].split(ctx.sizes)


def _in_order(others: Tensor | None, own: Sequence[Tensor], start: int) -> Tensor:
    """Return the parts of own rows [.., h] behind the first `start` rows of the others [.., h]."""
    if others is None:
        return _joined(own)
    return _joined((others[:start], *own, others[start:]))


def _joined(parts: Sequence[Tensor]) -> Tensor:
    """Return the rows of all parts [.., h], without a copy if at most one has any."""
    with_rows = [part for part in parts if len(part)]
    return torch.cat(with_rows) if len(with_rows) > 1 else (with_rows or parts)[0]


def _with_zeros(rows: Tensor, place: Tensor) -> tuple[Tensor, Tensor]:
    """Return rows with one of zeros behind them, and places that lead there where a choice was dropped."""
    if rows.shape[0] == place.numel():
        return rows, place
    return torch.cat((rows, rows.new_zeros(1, *rows.shape[1:]))), place.clamp(max=rows.shape[0])


__getattr__ = names_of_megatron(__name__)
