"""All-to-all from rows to heads and back (DeepSpeed Ulysses, arXiv:2309.14509).

In between, a rank computes full sequences of its share of the heads.
"""

from typing import Any

import torch
from torch import Tensor

from megatron.core.context_parallel.ring_and_allgather_attention import sample_to_zigzag_order, zigzag_to_sample_order
from megatron.core.parallel import collectives
from megatron.core.parallel.rank_grid import Axis


def rows_to_heads(x: Tensor, axis: Axis) -> Tensor:
    """Exchange this rank's rows of all heads, [s / c, b, n, d], for all rows of its heads, [s, b, n / c, d].

    The rows are in the order of the sample. c must divide n. Every rank of the axis must call.
    """
    return x if axis.size == 1 else _AllToAll.apply(x, axis, True)


def heads_to_rows(x: Tensor, axis: Axis) -> Tensor:
    """Invert `rows_to_heads`: [s, b, n / c, d] -> [s / c, b, n, d]. Every rank of the axis must call."""
    return x if axis.size == 1 else _AllToAll.apply(x, axis, False)


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, to_heads: bool) -> Tensor:
        """x: [s / c, b, n, d] -> [s, b, n / c, d] with `to_heads`, else the inverse. Every rank must call."""
        ctx.axis = axis
        ctx.to_heads = to_heads
        return _to_heads(x, axis) if to_heads else _to_rows(x, axis)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        """Run the opposite exchange of grad, which has the shape of the forward's result.

        Saved: no tensor, since the exchange is linear.
        """
        grad_x = _to_rows(grad, ctx.axis) if ctx.to_heads else _to_heads(grad, ctx.axis)
        return grad_x, None, None


def _to_heads(x: Tensor, axis: Axis) -> Tensor:
    by_rank = torch.stack(x.chunk(axis.size, dim=2))  # [c, s / c, b, n / c, d], heads for each rank
    received = collectives.all_to_all(by_rank, axis)  # [c, s / c, b, n / c, d], rows of each rank
    return zigzag_to_sample_order(received)  # [s, b, n / c, d]


def _to_rows(x: Tensor, axis: Axis) -> Tensor:
    # [c, s / c, b, n / c, d]: rows for each rank -> heads of each rank
    received = collectives.all_to_all(sample_to_zigzag_order(x, axis.size), axis)
    return torch.cat(received.unbind(0), dim=2)  # [s / c, b, n, d]
