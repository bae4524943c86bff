"""Megatron's regions: autograd collectives over the tensor-parallel axis of the current mesh."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from megatron.core.base.lazy_imports import names_of_megatron
from megatron.core.base.unsupported_arguments import takes
from megatron.core.parallel.global_state import get_mesh
from megatron.core.parallel.grid import Axis
from megatron.core.parallel.initialize_model_parallel import torch_group
from megatron.core.tensor_parallel import autograd_collectives


def axis_of(group: Any = None) -> Axis:
    """The tensor-parallel axis. group: None or its torch.distributed group; NotImplementedError for another."""
    if group is not None and group is not torch_group("tp"):
        raise NotImplementedError("group: only the tensor-parallel group is built; leave it out")
    return get_mesh()["tp"]


def _region(move: autograd_collectives.Move) -> Callable[..., Tensor]:
    def region(input_: Tensor, group: Any = None) -> Tensor:
        return move(input_, axis_of(group))

    return region


def _directions(move: autograd_collectives.Move, region: Callable[..., Tensor]) -> Any:
    class Directions:
        apply = staticmethod(region)

        @staticmethod
        def symbolic(graph: Any, input_: Tensor, *_: Any) -> Tensor:
            return move.forward(input_, axis_of())

        @staticmethod
        def backward(ctx: Any, grad_output: Tensor) -> Tensor:
            return move.backward(grad_output, axis_of())

    return Directions


copy_to_tensor_model_parallel_region = _region(autograd_collectives.copy)


reduce_from_tensor_model_parallel_region = _region(autograd_collectives.reduce)


scatter_to_tensor_model_parallel_region = _region(autograd_collectives.scatter_last)


gather_from_tensor_model_parallel_region = _region(autograd_collectives.gather_last)


scatter_to_sequence_parallel_region = _region(autograd_collectives.scatter_sequence)


reduce_scatter_to_sequence_parallel_region = takes(input_split_sizes=None, use_global_buffer=False)(
    _region(autograd_collectives.reduce_scatter_sequence)
)


@takes(output_split_sizes=None, use_global_buffer=False)
def gather_from_sequence_parallel_region(
    input_: Tensor, tensor_parallel_output_grad: bool = True, group: Any = None
) -> Tensor:
    """All-gather of the sequence. `tensor_parallel_output_grad`: the ranks' output gradients are partial sums, else
    equal."""
    move = autograd_collectives.gather_sequence if tensor_parallel_output_grad else autograd_collectives.whole_sequence
    return move(input_, axis_of(group))


_CopyToModelParallelRegion = _directions(autograd_collectives.copy, copy_to_tensor_model_parallel_region)


_ReduceFromModelParallelRegion = _directions(autograd_collectives.reduce, reduce_from_tensor_model_parallel_region)


_ScatterToModelParallelRegion = _directions(autograd_collectives.scatter_last, scatter_to_tensor_model_parallel_region)


_GatherFromModelParallelRegion = _directions(autograd_collectives.gather_last, gather_from_tensor_model_parallel_region)


_ScatterToSequenceParallelRegion = _directions(
    autograd_collectives.scatter_sequence, scatter_to_sequence_parallel_region
)


_ReduceScatterToSequenceParallelRegion = _directions(
    autograd_collectives.reduce_scatter_sequence, reduce_scatter_to_sequence_parallel_region
)


class _GatherFromSequenceParallelRegion(
    _directions(autograd_collectives.gather_sequence, gather_from_sequence_parallel_region)
):
    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None]:
        move = (
            autograd_collectives.gather_sequence
            if ctx.tensor_parallel_output_grad
            else autograd_collectives.whole_sequence
        )
        return move.backward(grad_output, axis_of()), None


# Megatron's names; they use the mesh's tensor-parallel axis.

__getattr__ = names_of_megatron(__name__)
