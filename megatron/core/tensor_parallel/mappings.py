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

from megatron.core import comm
from megatron.core.grid import Axis
from megatron.core.lazy import lazy_names

Move = Callable[[Tensor, Axis], Tensor]


def _identity(x: Tensor, axis: Axis) -> Tensor:
    return x.view_as(x)


def _all_reduce(x: Tensor, axis: Axis) -> Tensor:
    return comm.all_reduce(x.clone(memory_format=torch.contiguous_format), axis)


_all_gather_last = partial(comm.all_gather, dim=-1)


def _part(x: Tensor, axis: Axis) -> Tensor:
    return x[comm.my_part(x.shape[0], axis)].contiguous()


def _part_last(x: Tensor, axis: Axis) -> Tensor:
    return x[..., comm.my_part(x.shape[-1], axis)].contiguous()


def _move(name: str, forward: Move, backward: Move) -> Move:
    """An autograd function from its two directions. ctx holds the axis, since a backward looks nothing up."""

    def run_forward(ctx, x: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return forward(x, axis)

    def run_backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        return backward(grad, ctx.axis), None

    methods = {"forward": staticmethod(run_forward), "backward": staticmethod(run_backward)}
    function = type(name, (torch.autograd.Function,), methods)
    return lambda x, axis: x if axis.size == 1 else function.apply(x, axis)


copy = _move("copy", _identity, _all_reduce)
reduce = _move("reduce", _all_reduce, _identity)
gather_sequence = _move("gather_sequence", comm.all_gather, comm.reduce_scatter)
whole_sequence = _move("whole_sequence", comm.all_gather, _part)
reduce_scatter_sequence = _move("reduce_scatter_sequence", comm.reduce_scatter, comm.all_gather)
scatter_sequence = _move("scatter_sequence", _part, comm.all_gather)
scatter_last = _move("scatter_last", _part_last, _all_gather_last)
gather_last = _move("gather_last", _all_gather_last, _part_last)

# Megatron's names; they use the mesh's tensor-parallel axis.
__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "megatron.core.classic.tensor_parallel": "copy_to_tensor_model_parallel_region gather_from_sequence_parallel_region "
        "gather_from_tensor_model_parallel_region reduce_from_tensor_model_parallel_region "
        "reduce_scatter_to_sequence_parallel_region scatter_to_sequence_parallel_region scatter_to_tensor_model_parallel_region"
    },
)
