"""Megatron's regions: autograd collectives over the tensor-parallel axis of the current mesh.

Every tensor-parallel rank must call. Shapes: [s, b, h] with h split for `tensor_model_parallel` regions of the last
dimension, s split for `sequence_parallel` regions.
"""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from megatron.core.base.lazy_imports import names_of_megatron
from megatron.core.base.unsupported_arguments import accepts_defaults_only
from megatron.core.parallel.global_state import get_mesh
from megatron.core.parallel.initialize_model_parallel import torch_group
from megatron.core.parallel.rank_grid import Axis
from megatron.core.tensor_parallel import autograd_collectives
from megatron.core.tensor_parallel.autograd_collectives import AutogradCollective


def axis_of(group: Any = None) -> Axis:
    """Return the tensor-parallel axis. group: None or its torch.distributed group; NotImplementedError for another."""
    if group is not None and group is not torch_group("tp"):
        raise NotImplementedError("group: only the tensor-parallel group is built; leave it out")
    return get_mesh()["tp"]


# ---------------------------------------------------------------- Megatron's functions


def _region(collective: AutogradCollective) -> Callable[..., Tensor]:
    """Return Megatron's function of a collective: region(input_, group) -> a shape of `autograd_collectives`' table."""

    def region(input_: Tensor, group: Any = None) -> Tensor:
        """Run the collective over the tensor-parallel axis of the current mesh. Every rank of it must call.

        input_: [s, b, h]; the table of `autograd_collectives` lists which dimension is split before and after it.
        """
        return collective(input_, axis_of(group))

    return region


copy_to_tensor_model_parallel_region = _region(autograd_collectives.copy)
reduce_from_tensor_model_parallel_region = _region(autograd_collectives.reduce)
scatter_to_tensor_model_parallel_region = _region(autograd_collectives.scatter_last)
gather_from_tensor_model_parallel_region = _region(autograd_collectives.gather_last)
scatter_to_sequence_parallel_region = _region(autograd_collectives.scatter_sequence)
reduce_scatter_to_sequence_parallel_region = accepts_defaults_only(input_split_sizes=None, use_global_buffer=False)(
    _region(autograd_collectives.reduce_scatter_sequence)
)


@accepts_defaults_only(output_split_sizes=None, use_global_buffer=False)
def gather_from_sequence_parallel_region(
    input_: Tensor, tensor_parallel_output_grad: bool = True, group: Any = None
) -> Tensor:
    """All-gather the sequence: [s/t, b, h] -> [s, b, h]. Every tensor-parallel rank must call.

    tensor_parallel_output_grad: the ranks' gradients of the result are partial sums, to be summed; False:
    they are equal.
    """
    return _gather_of(tensor_parallel_output_grad)(input_, axis_of(group))


def _gather_of(tensor_parallel_output_grad: bool) -> AutogradCollective:
    if tensor_parallel_output_grad:
        return autograd_collectives.gather_sequence
    return autograd_collectives.gather_replicated_sequence


def all_to_all(
    group: Any,
    input_: Tensor,
    output_split_sizes_: Sequence[int] | None = None,
    input_split_sizes: Sequence[int] | None = None,
) -> Tensor:
    """Send rows of input_ [sum of input_split_sizes, ..] to each rank of the tensor-parallel group: [received, ..].

    Without sizes every rank gets an equal part. Every rank must call; the backward sends gradients back. group: None or
    the tensor-parallel group. Raises ValueError if the sizes do not fit.
    """
    axis = axis_of(group)
    equal = [input_.shape[0] // axis.size] * axis.size
    return autograd_collectives.all_to_all_v(
        input_, axis, list(input_split_sizes or equal), list(output_split_sizes_ or equal)
    )


# ---------------------------------------------------------------- autograd functions of Megatron, which forks call


def _autograd_function(collective: AutogradCollective, region: Callable[..., Tensor]) -> Any:
    """Return Megatron's autograd function of a collective, whose directions forks call."""

    class Region:
        apply = staticmethod(region)

        @staticmethod
        def symbolic(graph: Any, input_: Tensor, *_: Any) -> Tensor:
            """input_: [s, b, h] -> a shape of `autograd_collectives`' table. Every tensor-parallel rank must call."""
            return collective.forward(input_, axis_of())

        @staticmethod
        def backward(ctx: Any, grad_output: Tensor) -> Tensor:
            """grad_output: the shape of the result -> the shape of the input. Every tensor-parallel rank must call.

            Saved: no tensor, since both collectives are linear.
            """
            return collective.backward(grad_output, axis_of())

    return Region


_CopyToModelParallelRegion = _autograd_function(autograd_collectives.copy, copy_to_tensor_model_parallel_region)
_ReduceFromModelParallelRegion = _autograd_function(
    autograd_collectives.reduce, reduce_from_tensor_model_parallel_region
)
_ScatterToModelParallelRegion = _autograd_function(
    autograd_collectives.scatter_last, scatter_to_tensor_model_parallel_region
)
_GatherFromModelParallelRegion = _autograd_function(
    autograd_collectives.gather_last, gather_from_tensor_model_parallel_region
)
_ScatterToSequenceParallelRegion = _autograd_function(
    autograd_collectives.scatter_sequence, scatter_to_sequence_parallel_region
)
_ReduceScatterToSequenceParallelRegion = _autograd_function(
    autograd_collectives.reduce_scatter_sequence, reduce_scatter_to_sequence_parallel_region
)


class _GatherFromSequenceParallelRegion(
    _autograd_function(autograd_collectives.gather_sequence, gather_from_sequence_parallel_region)
):
    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None]:
        """grad_output: [s, b, h] -> [s/t, b, h]. Every tensor-parallel rank must call.

        Saved: no tensor, since both collectives are linear. ctx: the caller's, with Megatron's attribute
        `tensor_parallel_output_grad`.
        """
        collective = _gather_of(ctx.tensor_parallel_output_grad)
        return collective.backward(grad_output, axis_of()), None


__getattr__ = names_of_megatron(__name__)
