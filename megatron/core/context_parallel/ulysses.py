"""Heads exchanged for rows (DeepSpeed Ulysses, arXiv:2309.14509): a rank computes whole sequences of its share of the
heads."""

from typing import Any

import torch
from torch import Tensor

from megatron.core.context_parallel.ring_attention import by_rank, in_order
from megatron.core.parallel import collectives
from megatron.core.parallel.grid import Axis


def whole_sequences(x: Tensor, axis: Axis) -> Tensor:
    """[s / c, b, n, d] of my rows -> [s, b, n / c, d] in the sample's order, of my share of the heads. Every rank
    must call."""
    return x if axis.size == 1 else _Exchange.apply(x, axis, True)


def my_rows(x: Tensor, axis: Axis) -> Tensor:
    """`whole_sequences` backwards."""
    return x if axis.size == 1 else _Exchange.apply(x, axis, False)


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, to_whole: bool) -> Tensor:
        ctx.axis, ctx.to_whole = axis, to_whole
        return (_to_whole if to_whole else _to_rows)(x, axis)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return (_to_rows if ctx.to_whole else _to_whole)(grad, ctx.axis), None, None


def _to_whole(x: Tensor, axis: Axis) -> Tensor:
    shares = torch.stack(x.chunk(axis.size, dim=2))  # [c, s / c, b, n / c, d]
    return in_order(collectives.all_to_all(shares, axis))


def _to_rows(x: Tensor, axis: Axis) -> Tensor:
    return torch.cat(collectives.all_to_all(by_rank(x, axis.size), axis).unbind(0), dim=2)
