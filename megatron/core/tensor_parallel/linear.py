"""The matrix product behind every parallel linear layer: its backward overlaps communication with the weight gradient.

Column-parallel, Y = X A with A = [A_1 .. A_t] split by columns:      backward   dX = sum over ranks of dY_i A_i^T
    the input is replicated, so dX is summed over the axis;
    under sequence parallelism the ranks hold parts of X, which are gathered on the way in and, to save memory, gathered again
    in the backward; dX is then reduce-scattered.
The sum of dX (and the second gather) travel while the weight gradient dA_i = X^T dY_i is computed.

A weight that lies in a gradient buffer has `main_grad`, and its gradient is accumulated there; otherwise autograd gets it.
"""

import torch
from torch import Tensor

from megatron.core import comm
from megatron.core.grid import Axis


def weight_gradient(weight: Tensor, grad: Tensor, x: Tensor) -> Tensor | None:
    """Add grad^T x to `weight.main_grad` and return None; return the product where the weight has no buffer.

    grad: [..., out], x: [..., in], weight: [out, in].
    """
    grad, x = grad.flatten(0, -2), x.flatten(0, -2)
    main_grad = getattr(weight, "main_grad", None)
    if main_grad is None:
        return grad.t() @ x
    if main_grad.dtype == grad.dtype:
        main_grad.addmm_(grad.t(), x)
    else:
        main_grad.add_(grad.t() @ x)
    return None


class _ColumnLinear(torch.autograd.Function):
    """x [s(/t), b, in] -> [s, b, out/t], with the moves of the input on either side of the product."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, axis: Axis, sequence_parallel: bool) -> Tensor:
        ctx.save_for_backward(x, weight)
        # save_for_backward returns a new object of the weight; its buffer hangs on the one we were given.
        ctx.weight, ctx.axis, ctx.sequence_parallel = weight, axis, sequence_parallel
        full = comm.all_gather(x, axis) if sequence_parallel else x
        return full @ weight.t()

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        x, weight = ctx.saved_tensors
        needs_x, needs_weight = ctx.needs_input_grad[:2]
        gathering = comm.start_all_gather(x, ctx.axis) if ctx.sequence_parallel and needs_weight else None
        grad_x = summing = grad_weight = None
        if needs_x:
            grad_x = grad @ weight
            start = comm.start_reduce_scatter if ctx.sequence_parallel else comm.start_all_reduce
            summing = start(grad_x, ctx.axis)
        if needs_weight:
            grad_weight = weight_gradient(ctx.weight, grad, gathering.wait() if gathering else x)
        return summing.wait() if summing else None, grad_weight, None, None


class _Linear(torch.autograd.Function):
    """x [.., in] -> [.., out] without communication: the product inside a row-parallel layer."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.weight = weight
        return x @ weight.t()

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        grad_x = grad @ weight if ctx.needs_input_grad[0] else None
        return grad_x, weight_gradient(ctx.weight, grad, x) if ctx.needs_input_grad[1] else None


def column_linear(x: Tensor, weight: Tensor, axis: Axis, *, sequence_parallel: bool = False) -> Tensor:
    """x A_i for my columns. x: [s, b, in], or my part of the sequence [s/t, b, in]; weight [out/t, in] -> [s, b, out/t]."""
    return _ColumnLinear.apply(x, weight, axis, sequence_parallel and axis.size > 1)


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """x [.., in] times weight [out, in] transposed -> [.., out]."""
    return _Linear.apply(x, weight)
