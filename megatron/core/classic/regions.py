"""Megatron's regions: the moves of `megatron.core.tensor_parallel.mappings` over the tensor-parallel axis of the current mesh.

Each is also a class with `apply`, and its two directions by themselves: `symbolic(graph, x)` and `backward(ctx, grad)`.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from megatron.core.base.signatures import takes
from megatron.core.parallel import collectives
from megatron.core.parallel.global_state import get_mesh
from megatron.core.parallel.grid import Axis
from megatron.core.parallel.initialize_groups import torch_group
from megatron.core.tensor_parallel import mappings


def axis_of(group: Any = None) -> Axis:
    """The tensor-parallel axis. group: None or its torch.distributed group; NotImplementedError for another."""
    if group is not None and group is not torch_group("tp"):
        raise NotImplementedError("group: only the tensor-parallel group is built; leave it out")
    return get_mesh()["tp"]


def _region(move: mappings.Move) -> Callable[..., Tensor]:
    def region(input_: Tensor, group: Any = None) -> Tensor:
        return move(input_, axis_of(group))

    return region


def _directions(move: mappings.Move, region: Callable[..., Tensor]) -> Any:
    class Directions:
        apply = staticmethod(region)

        @staticmethod
        def symbolic(graph: Any, input_: Tensor, *_: Any) -> Tensor:
            return move.forward(input_, axis_of())

        @staticmethod
        def backward(ctx: Any, grad_output: Tensor) -> Tensor:
            return move.backward(grad_output, axis_of())

    return Directions


copy_to_tensor_model_parallel_region = _region(mappings.copy)
reduce_from_tensor_model_parallel_region = _region(mappings.reduce)
scatter_to_tensor_model_parallel_region = _region(mappings.scatter_last)
gather_from_tensor_model_parallel_region = _region(mappings.gather_last)
scatter_to_sequence_parallel_region = _region(mappings.scatter_sequence)
reduce_scatter_to_sequence_parallel_region = takes(input_split_sizes=None, use_global_buffer=False)(
    _region(mappings.reduce_scatter_sequence)
)


@takes(output_split_sizes=None, use_global_buffer=False)
def gather_from_sequence_parallel_region(
    input_: Tensor, tensor_parallel_output_grad: bool = True, group: Any = None
) -> Tensor:
    """All-gather of the sequence. `tensor_parallel_output_grad`: the ranks' output gradients are partial sums, else equal."""
    move = mappings.gather_sequence if tensor_parallel_output_grad else mappings.whole_sequence
    return move(input_, axis_of(group))


_CopyToModelParallelRegion = _directions(mappings.copy, copy_to_tensor_model_parallel_region)
_ReduceFromModelParallelRegion = _directions(mappings.reduce, reduce_from_tensor_model_parallel_region)
_ScatterToModelParallelRegion = _directions(mappings.scatter_last, scatter_to_tensor_model_parallel_region)
_GatherFromModelParallelRegion = _directions(mappings.gather_last, gather_from_tensor_model_parallel_region)
_ScatterToSequenceParallelRegion = _directions(mappings.scatter_sequence, scatter_to_sequence_parallel_region)
_ReduceScatterToSequenceParallelRegion = _directions(
    mappings.reduce_scatter_sequence, reduce_scatter_to_sequence_parallel_region
)


class _GatherFromSequenceParallelRegion(_directions(mappings.gather_sequence, gather_from_sequence_parallel_region)):
    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None]:
        move = mappings.gather_sequence if ctx.tensor_parallel_output_grad else mappings.whole_sequence
        return move.backward(grad_output, axis_of()), None


@takes(tp_group=None)
def split_tensor_into_1d_equal_chunks(tensor: Tensor, new_buffer: bool = False) -> Tensor:
    """This tensor-parallel rank's part of the numbers of a tensor that all ranks hold: a view, or a copy."""
    part = tensor.reshape(-1)[collectives.my_part(tensor.numel(), axis_of())]
    return part.clone() if new_buffer else part


@takes(tp_group=None)
def gather_split_1d_tensor(tensor: Tensor) -> Tensor:
    """The ranks' parts, one after the other. Every rank of the axis must call."""
    return collectives.all_gather(tensor.reshape(-1), axis_of())
