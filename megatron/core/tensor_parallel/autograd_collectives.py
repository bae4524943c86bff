"""Autograd collectives over the tensor-parallel axis: a collective in the forward, its counterpart in the backward.

                            forward                    backward               shape of x -> result
copy                        identity                   all-reduce             any
reduce                      all-reduce                 identity               any
scatter_last                my part, last dim          all-gather, last dim   [.., n] -> [.., n/t]
gather_last                 all-gather, last dim       my part, last dim      [.., n/t] -> [.., n]
scatter_sequence            my part, dim 0             all-gather, dim 0      [s, ..] -> [s/t, ..]
gather_sequence             all-gather, dim 0          reduce-scatter, dim 0  [s/t, ..] -> [s, ..]
gather_replicated_sequence  all-gather, dim 0          my part, dim 0         [s/t, ..] -> [s, ..]
reduce_scatter_sequence     reduce-scatter, dim 0      all-gather, dim 0      [s, ..] -> [s/t, ..]

all_to_all_v                rows to each rank          rows back to each rank [sent, ..] -> [received, ..]

`copy` and `reduce` are "f" and "g" of Megatron's paper (arXiv:1909.08053). `gather_sequence` is for gradients that are
partial sums on each rank, `gather_replicated_sequence` for gradients that are equal on all ranks.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megatron.core.base.async_handle import AsyncHandle
from megatron.core.parallel import collectives
from megatron.core.parallel.rank_grid import Axis

Collective = Callable[[Tensor, Axis], Tensor]


class AutogradCollective:
    """An autograd function made of two collectives: `collective(x, axis)` runs `forward`, and its gradient `backward`.

    The table of this file lists the shapes of x and of the result; both have the same dtype. Every rank of the axis
    must call, forward and backward. Nothing happens on an axis of one rank. Raises ValueError if the ranks do not
    divide a dimension that is split.
    """

    def __init__(self, name: str, forward: Collective, backward: Collective):
        self.forward = forward
        self.backward = backward

        def run_forward(ctx, x: Tensor, axis: Axis) -> Tensor:
            ctx.axis = axis  # no tensor is saved; the axis is, since a backward looks nothing up
            return forward(x, axis)

        def run_backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
            """grad: the shape of the result -> the shape of x. Saved: no tensor, since both collectives are linear."""
            return backward(grad, ctx.axis), None

        methods = {"forward": staticmethod(run_forward), "backward": staticmethod(run_backward)}
        self.function = type(name, (torch.autograd.Function,), methods)

    def __call__(self, x: Tensor, axis: Axis) -> Tensor:
        """Return the collective's result: x [n, ..] -> a shape of the table. Every rank of the axis must call."""
        return x if axis.size == 1 else self.function.apply(x, axis)


class _AllToAllV(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        """x: [sum of sent, ..] -> [sum of received, ..]"""
        ctx.axis = axis
        ctx.splits = sent, received
        return collectives.all_to_all_v(x, axis, sent, received)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """grad: [sum of received, ..] -> [sum of sent, ..]. Saved: the numbers of rows; the exchange is linear."""
        sent, received = ctx.splits
        return collectives.all_to_all_v(grad.contiguous(), ctx.axis, received, sent), None, None, None


def all_to_all_v(x: Tensor, axis: Axis, sent: Sequence[int], received: Sequence[int]) -> Tensor:
    """Send sent[i] rows of x to the rank at position i, and receive received[i] rows of it.

    x: [sum of sent, ..] -> [sum of received, ..], both in rank order. Every rank of the axis must call, forward and
    backward; the backward sends the gradients of the rows back. Raises ValueError if the numbers do not fit x.
    """
    return _AllToAllV.apply(x, axis, sent, received)


class StartedAllToAll:
    """`all_to_all_v` in two halves, with other work between them: `StartedAllToAll(x, axis, sent, received)`, then `wait()`.

    The backward of `wait` starts to send the gradients back, and the backward of the start waits for them: what lies between
    the two in the forward lies between them in the backward.
    """

    def __init__(self, x: Tensor, axis: Axis, sent: Sequence[int], received: Sequence[int]):
        self.in_flight: AsyncHandle[Tensor] | None = None
        self.axis = axis
        self.splits = sent, received
        # []: has no values, and ties the halves together in autograd's graph
        self._started: Tensor | None = _Start.apply(x, self)

    def wait(self) -> Tensor:
        """Return what has arrived: [sum of received, ..]. Called once."""
        # The graph refers to this object. With a reference back, a graph without a backward, as a recomputation makes, would
        # keep its tensors until Python looks for cycles.
        started, self._started = self._started, None
        return _Wait.apply(started, self)


class _Start(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, exchange: StartedAllToAll) -> Tensor:
        """x: [sum of sent, ..] -> [0]"""
        ctx.exchange = exchange
        exchange.in_flight = collectives.start_all_to_all_v(x.contiguous(), exchange.axis, *exchange.splits)
        return x.new_empty(0)

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor | None, ...]:
        """-> the gradient of x, which `_Wait` has started to send. Saved: no tensor."""
        handle, ctx.exchange.in_flight = ctx.exchange.in_flight, None
        return handle.wait(), None


class _Wait(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, started: Tensor, exchange: StartedAllToAll) -> Tensor:
        ctx.exchange = exchange
        handle, exchange.in_flight = exchange.in_flight, None
        return handle.wait()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """grad: [sum of received, ..] -> [0]. Saved: no tensor."""
        exchange = ctx.exchange
        sent, received = exchange.splits
        exchange.in_flight = collectives.start_all_to_all_v(grad.contiguous(), exchange.axis, received, sent)
        return grad.new_empty(0), None


# ---------------------------------------------------------------- directions


def _identity(x: Tensor, axis: Axis) -> Tensor:
    return x.view_as(x)


def _all_reduce(x: Tensor, axis: Axis) -> Tensor:
    # A copy is reduced: the collective works in place, and autograd's tensors are not ours to change.
    return collectives.all_reduce(x.clone(memory_format=torch.contiguous_format), axis)


_all_gather_last = partial(collectives.all_gather, dim=-1)


def _my_part(x: Tensor, axis: Axis) -> Tensor:
    return x[collectives.local_slice(x.shape[0], axis)].contiguous()


def _my_part_last(x: Tensor, axis: Axis) -> Tensor:
    return x[..., collectives.local_slice(x.shape[-1], axis)].contiguous()


# ---------------------------------------------------------------- the pairs

copy = AutogradCollective("copy", _identity, _all_reduce)
reduce = AutogradCollective("reduce", _all_reduce, _identity)

scatter_last = AutogradCollective("scatter_last", _my_part_last, _all_gather_last)
gather_last = AutogradCollective("gather_last", _all_gather_last, _my_part_last)

scatter_sequence = AutogradCollective("scatter_sequence", _my_part, collectives.all_gather)
gather_sequence = AutogradCollective("gather_sequence", collectives.all_gather, collectives.reduce_scatter)
gather_replicated_sequence = AutogradCollective("gather_replicated_sequence", collectives.all_gather, _my_part)
reduce_scatter_sequence = AutogradCollective(
    "reduce_scatter_sequence", collectives.reduce_scatter, collectives.all_gather
)
