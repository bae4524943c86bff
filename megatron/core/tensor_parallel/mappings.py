"""Moves of an activation between layouts over the tensor-parallel axis; each is a pair of collectives.

| move                    | forward                 | backward         | use                                             |
|-------------------------|-------------------------|------------------|------------------------------------------------
-|
| copy                    | identity                | all-reduce       | replicated input of a column-parallel layer     |
| reduce                  | all-reduce              | identity         | partial output of a row-parallel layer          |
| gather_sequence         | all-gather, dim 0       | reduce-scatter   | sequence-split input of a column-parallel layer |
| whole_sequence          | all-gather, dim 0       | my part          | sequence-split to replicated, same use on all   |
| reduce_scatter_sequence | reduce-scatter, dim 0   | all-gather       | partial output, result split along the sequence |
| scatter_sequence        | my part of dim 0        | all-gather       | replicated to sequence-split                    |
| scatter_last            | my part of the last dim | all-gather, last | replicated to feature-split                     |
| gather_last             | all-gather, last dim    | my part          | feature-split to replicated                     |

Every rank of the axis must call, forward and backward.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from megatron.core.base.lazy_imports import all_names
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

# Megatron's names; they use the mesh's tensor-parallel axis.
__getattr__ = all_names(__name__, "megatron.core.classic.regions")
