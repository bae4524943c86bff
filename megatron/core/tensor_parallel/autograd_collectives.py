"""Pairs of collectives of an activation over the tensor-parallel axis: one in forward, its counterpart in backward."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from megatron.core.parallel import collectives
from megatron.core.parallel.grid import Axis

Direction = Callable[[Tensor, Axis], Tensor]


class Move:
    """An autograd function from its two directions. ctx holds the axis, since a backward looks nothing up."""

    def __init__(self, name: str, forward: Direction, backward: Direction):
        self.forward, self.backward = forward, backward

        def run_forward(ctx, x: Tensor, axis: Axis) -> Tensor:
            ctx.axis = axis
            return forward(x, axis)

        def run_backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
            return backward(grad, ctx.axis), None

        methods = {"forward": staticmethod(run_forward), "backward": staticmethod(run_backward)}
        self.function = type(name, (torch.autograd.Function,), methods)

    def __call__(self, x: Tensor, axis: Axis) -> Tensor:
        return x if axis.size == 1 else self.function.apply(x, axis)


def _identity(x: Tensor, axis: Axis) -> Tensor:
    return x.view_as(x)


def _all_reduce(x: Tensor, axis: Axis) -> Tensor:
    return collectives.all_reduce(x.clone(memory_format=torch.contiguous_format), axis)


_all_gather_last = partial(collectives.all_gather, dim=-1)


def _part(x: Tensor, axis: Axis) -> Tensor:
    return x[collectives.my_part(x.shape[0], axis)].contiguous()


def _part_last(x: Tensor, axis: Axis) -> Tensor:
    return x[..., collectives.my_part(x.shape[-1], axis)].contiguous()


copy = Move("copy", _identity, _all_reduce)


reduce = Move("reduce", _all_reduce, _identity)


gather_sequence = Move("gather_sequence", collectives.all_gather, collectives.reduce_scatter)


whole_sequence = Move("whole_sequence", collectives.all_gather, _part)


reduce_scatter_sequence = Move("reduce_scatter_sequence", collectives.reduce_scatter, collectives.all_gather)


scatter_sequence = Move("scatter_sequence", _part, collectives.all_gather)


scatter_last = Move("scatter_last", _part_last, _all_gather_last)


gather_last = Move("gather_last", _all_gather_last, _part_last)
