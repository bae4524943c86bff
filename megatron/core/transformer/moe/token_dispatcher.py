"""How tokens reach their experts on other ranks, and how the results come back.

    alltoall    each row (token, expert) is sent to the ranks of its expert
                rows by expert -> all-to-all -> rows by (rank, expert) -> experts -> all-to-all -> rows by expert -> sums
    allgather   every rank receives all tokens, takes those of its experts, and the sums of results are scattered

Both send over "ep_etp": a rank of etp has a part of the hidden features of an expert, so a row goes to all ranks of its expert,
and their results are added. Weights stay where the token is. Every rank of ep_etp must call, forward and backward, also one
without rows.
"""

from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from megatron.core.base.lazy_imports import names_of_megatron
from megatron.core.ops.decisions_overridable_for_memory_prediction import row_counts
from megatron.core.parallel import collectives
from megatron.core.tensor_parallel import autograd_collectives
from megatron.core.transformer.layer_parallel_context import ExpertParallel
from megatron.core.transformer.moe.moe_utils import order_by_expert, place_of_choices


class EarlierWgrads:
    """Takes the weight gradients of a call of the experts that is not the last of several in the backward.

    They are terms of sums, which the last call completes.
    """

    def put(self, call: Hashable, work: Callable[[], None]) -> None:
        """Take the `work` of one product, here to compute it at once."""
        work()


class DelayedWgrads(EarlierWgrads):
    """Delays them until the backward of another result, so that gradients that other ranks wait for are sent first."""

    def __init__(self) -> None:
        self._work: dict[Hashable, Callable[[], None]] = {}

    def put(self, call: Hashable, work: Callable[[], None]) -> None:
        """Delay `work`. A second backward through the same graph replaces that of the first."""
        self._work[call] = work

    def before_backward_of(self, result: Tensor) -> Tensor:
        """Return `result`, of any shape. In the backward, what was put here comes right before that of `result`."""
        return _ComputeDelayed.apply(result, self)

    def compute(self) -> None:
        while self._work:
            self._work.pop(next(iter(self._work)))()


class _ComputeDelayed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, result: Tensor, delayed: DelayedWgrads) -> Tensor:
        ctx.delayed = delayed
        return result.view_as(result)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        ctx.delayed.compute()
        return grad, None


class ExpertRows(NamedTuple):
    """Rows that this rank's experts compute: x [rows, h], by expert; counts: the rows of each.

    wgrads: takes the weight gradients of this call, if it is not the last of several in the backward. None: it is.
    """

    x: Tensor
    counts: tuple[int, ...]
    wgrads: EarlierWgrads | None = None


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

    def sum_of_results(self, *results: Tensor, rounded: bool = True) -> Tensor:
        """Return [T, h], the sum of each token's results times weights.

        results: [.., h], parts in the order of `take_rows`. rounded: to their dtype; else in that of the weights, if it is wider.
        """
        return RowsToTokens.apply(self.weights, self.order, self.place, rounded, *results)

    def take_rows(self, tokens: Tensor, order: Tensor, topk: int, sizes: Sequence[int]) -> tuple[Tensor, ...]:
        """Return the row of each choice in `order` [rows], in parts of `sizes` rows, [.., h] each. tokens: [T, h]"""
        self.order = order
        self.place = place_of_choices(order, (len(tokens), topk))
        return TokensToRows.apply(tokens, self.order, self.place, sizes)


class AllToAllDispatcher(TokenDispatcher):
    """Send each row to the ranks of its expert. For the methods see `TokenDispatcher`.

    A rank's own rows do not travel. It computes those of the first half of its experts while the others come, and
    those of the second half while the others' results go back; in the backward the other way around:

        send rows ............ wait         send results ............. wait
                  own, first half   others'              own, second half

    In the backward, the gradients of others' rows are sent before linear_fc1's weight gradients are computed from them.
    """

    @property
    def first_half(self) -> int:
        """The number of experts in the first half; a second half without any is left out."""
        return (self.local + 1) // 2

    def start(self, tokens: Tensor, ids: Tensor, weights: Tensor, kept: Tensor | None) -> None:
        ep, etp, ep_etp = self.ranks.ep, self.ranks.etp, self.ranks.ep_etp
        topk = ids.shape[1]
        order, counts = order_by_expert(ids, kept, self.num_experts)
        self.weights = weights
        if ep_etp.size == 1:
            self.own_counts = row_counts(counts, ids.numel())
            rows = sum(self.own_counts)
            self.own_parts = self.take_rows(tokens, order[:rows], topk, [rows])
            return

        # how many rows go where; each goes to all ranks that have a part of its expert
        counts = counts.view(ep.size, self.local)
        arriving = collectives.start_all_to_all(counts.repeat_interleave(etp.size, 0), ep_etp)  # [ranks, local]
        sent_counts = row_counts(counts, ids.numel())  # [ep][local]
        self.own_counts = sent_counts[ep.rank]
        self.rows_to_ep = [sum(of_rank) for of_rank in sent_counts]  # [ep]

        # the others' rows, then own ones of the first half of the experts, then of the second
        start = sum(self.rows_to_ep[: ep.rank])
        own, rows = sum(self.own_counts), sum(self.rows_to_ep)
        order = torch.cat((order[:start], order[start + own : rows], order[start : start + own]))
        first = sum(self.own_counts[: self.first_half])
        sizes = [rows - own, first, own - first] if self.first_half < self.local else [rows - own, own]
        others, *self.own_parts = self.take_rows(tokens, order, topk, sizes)

        # the rows: `input_splits` and `output_splits` of torch's all_to_all_single
        self.received_counts = row_counts(arriving.wait(), ids.numel() * etp.size)  # [ranks][local]
        self.received_counts[ep_etp.rank] = [0] * self.local  # own rows do not travel
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
        ep, etp, ep_etp = self.ranks.ep, self.ranks.etp, self.ranks.ep_etp
        if ep_etp.size == 1:
            results = experts(ExpertRows(self.own_parts[0], tuple(self.own_counts)))
            return self.sum_of_results(results)

        # own rows of the first half of the experts, while the others' rows come
        half = self.first_half
        no_rows = [0] * self.local
        delayed = DelayedWgrads()
        # the number of calls is equal on every rank, whichever rows there are: modules that gather weights need that
        first = experts(ExpertRows(self.own_parts[0], (*self.own_counts[:half], *no_rows[half:])))
        own_results = [delayed.before_backward_of(first)]

        # the others' rows come by (rank, expert); experts take them by (expert, rank)
        by_expert = list(zip(*self.received_counts))  # [local][ranks]
        rows = transpose_chunks(self.sending.wait(), self.received_counts)
        results = experts(ExpertRows(rows, tuple(map(sum, by_expert)), delayed))
        results = transpose_chunks(results, by_expert)
        returning = autograd_collectives.StartedAllToAll(results, ep_etp, self.output_splits, self.input_splits)

        # own rows of the second half, while the others' results go back
        if half < self.local:
            second_counts = (*no_rows[:half], *self.own_counts[half:])
            own_results.append(experts(ExpertRows(self.own_parts[1], second_counts, EarlierWgrads())))
        returned = returning.wait()
        if etp.size == 1:
            return self.sum_of_results(returned, *own_results)
        terms = list(returned.split(self.input_splits))  # of each rank: ranks of etp have terms of one sum
        terms[ep_etp.rank] = torch.cat(own_results)
        firsts = range(0, ep_etp.size, etp.size)
        sums = [sum(terms[i + 1 : i + etp.size], terms[i]) for i in firsts]
        own = sums.pop(ep.rank)
        return self.sum_of_results(*sums, own)


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
        order, counts = order_by_expert(ids, is_here, self.local)
        self.counts = row_counts(counts, ids.numel() // self.ranks.ep.size)
        rows = sum(self.counts)
        (self.rows,) = self.take_rows(tokens, order[:rows], ids.shape[1], [rows])

    def finish(self, experts: Experts) -> Tensor:
        results = experts(ExpertRows(self.rows, tuple(self.counts)))
        terms = self.sum_of_results(results, rounded=False)  # [ranks T, h]
        # rounded once, as the sum of one rank is
        return autograd_collectives.reduce_scatter_sequence(terms, self.ranks.ep_etp).to(results.dtype)


# alltoall_seq: Megatron's older all-to-all, which gathers over the tensor-parallel ranks at another point
DISPATCHERS = {"alltoall": AllToAllDispatcher, "alltoall_seq": AllToAllDispatcher, "allgather": AllGatherDispatcher}


class TokensToRows(torch.autograd.Function):
    """tokens [T, h] -> the row of each choice that is kept, in the order of the dispatch: parts [.., h]."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, order: Tensor, place: Tensor, sizes: Sequence[int]) -> tuple[Tensor, ...]:
        """order: int64 [rows], the choice of each row; place: int64 [T, K], the row of each choice, `rows` if dropped.

        sizes: the rows of each part.
        """
        ctx.save_for_backward(place)
        token = order // place.shape[1]
        return tuple(tokens.index_select(0, of_part) for of_part in token.split_with_sizes(sizes))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """grads: those of the parts -> [T, h], the sum over the choices of a token in their order. Saved: place."""
        (place,) = ctx.saved_tensors
        return functional.embedding_bag(place, _with_zeros(_joined(grads), place), mode="sum"), None, None, None


class RowsToTokens(torch.autograd.Function):
    """rows in parts [.., h], weights [T, K] -> [T, h], the sum of each token's rows times weights, in the order of its choices.

    Computed in the dtype of the weights if it is wider.
    """

    @staticmethod
    def forward(ctx: Any, weights: Tensor, order: Tensor, place: Tensor, rounded: bool, *parts: Tensor) -> Tensor:
        """order, place: see `TokensToRows`. rounded: to the dtype of the rows."""
        rows = _joined(parts)
        ctx.save_for_backward(rows, weights, order)
        ctx.sizes = [part.shape[0] for part in parts]
        values = _with_zeros(rows, place)
        if rows.dtype == weights.dtype:
            return functional.embedding_bag(place, values, per_sample_weights=weights, mode="sum")
        dtype = torch.promote_types(rows.dtype, weights.dtype)
        factors = weights.to(dtype)
        total = values.index_select(0, place[:, 0]).to(dtype) * factors[:, :1]
        for j in range(1, place.shape[1]):
            total.addcmul_(values.index_select(0, place[:, j]).to(dtype), factors[:, j : j + 1])
        return total.to(rows.dtype) if rounded else total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """grad: [T, h] -> the gradients of weights and of the parts. Saved: both, and order.

        The parts have memory of their own, so that each is returned when its experts are done.
        """
        rows, weights, order = ctx.saved_tensors
        dtype = torch.promote_types(rows.dtype, weights.dtype)
        token = order // weights.shape[1]  # [rows]
        factors = weights.flatten()[order].unsqueeze(-1)  # [rows, 1]
        grad_parts: list[Tensor] = []
        products: list[Tensor] = []
        of_parts = zip(*(each.split_with_sizes(ctx.sizes) for each in (token, rows, factors)))
        for of_part, part, factor in of_parts:
            of_rows = grad.index_select(0, of_part).to(dtype)
            if ctx.needs_input_grad[0]:
                products.append((of_rows * part).sum(-1))
            grad_parts.append(of_rows.mul_(factor).to(part.dtype))
        grad_weights = None
        if ctx.needs_input_grad[0]:
            of_weights = torch.cat(products)  # [rows]
            grad_weights = of_weights.new_zeros(weights.numel()).index_copy_(0, order, of_weights)
            grad_weights = grad_weights.view(weights.shape).to(weights.dtype)
        return grad_weights, None, None, None, *grad_parts


def _joined(parts: Sequence[Tensor]) -> Tensor:
    """Return the rows of all parts [.., h], without a copy if at most one has any."""
    with_rows = [part for part in parts if len(part)]
    return torch.cat(with_rows) if len(with_rows) > 1 else (with_rows or parts)[0]


def _with_zeros(rows: Tensor, place: Tensor) -> Tensor:
    """Return rows with one of zeros behind them if a choice was dropped, whose place it is."""
    return rows if rows.shape[0] == place.numel() else torch.cat((rows, rows.new_zeros(1, *rows.shape[1:])))


__getattr__ = names_of_megatron(__name__)
