"""The parameters and gradients of a model, each element once over all ranks, and numbers of all of them.

A parameter's element is counted by the rank that owns it: `placement.owned_pieces` names the elements, and among
data-parallel ranks the owner is the rank that updates the shard, or the first rank if all have copies.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from megatron.core.distributed.buffer_plan import overlaps
from megatron.core.distributed.data_parallel import DistributedDataParallel
from megatron.core.distributed.param_grad_state import place_in_bucket
from megatron.core.offload.tensor_in_memory_or_file import read_parts
from megatron.core.parallel import collectives
from megatron.core.parallel.mesh import Mesh
from megatron.core.sharding.boxes import rows_to_flat_range, slices
from megatron.core.sharding.placement import owned_pieces

_WIDENED_AT_ONCE = 2**24  # elements; their two float64 copies take 256 MB


def owned_elements(
    chunks: Sequence[DistributedDataParallel], mesh: Mesh, *, grads: bool
) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, values) of the parameters, or of the gradients in the buffers, that this rank owns.

    Values are parts, flat [elements]; of a frozen parameter in no buffer, a box of its own number of dimensions. Over all ranks
    every element is yielded once. No communication. Only elements that this rank updates are read, so a parameter all-gather
    may be in flight.
    """
    for chunk in chunks:
        # parameters in buffers: trained ones, and frozen ones of ZeRO stage 3
        for buffer in chunk.buffers if grads else (*chunk.buffers, *chunk.frozen_buffers):
            if not buffer.axes.replica.is_first:
                continue
            values = buffer.sums if grads else buffer.owned_params
            for param_range in buffer.plan.param_ranges:
                parameter = buffer.parameters[param_range.name]
                shape = tuple(parameter.shape)
                for _, local in owned_pieces(parameter.placement, shape, mesh):
                    first, last = rows_to_flat_range(local, shape)
                    for run in overlaps(buffer.owned_runs, param_range.start + first, param_range.start + last):
                        for part in read_parts(values.at(*run)):
                            yield param_range.name, part
        if grads:
            continue
        # frozen parameters of other stages, which are in no buffer
        for name, parameter in chunk.module.named_parameters():
            if place_in_bucket(parameter) is not None:
                continue
            if mesh.grad_axes(parameter.placement.reduce_over).reduce.is_first:
                for _, local in owned_pieces(parameter.placement, tuple(parameter.shape), mesh):
                    yield name, parameter.data[slices(local)]


@torch.no_grad()
def params_norm(chunks: Sequence[DistributedDataParallel], mesh: Mesh, device: torch.device | str) -> float:
    """Return the L2 norm of all parameters of the model. One all-reduce of a scalar; every rank must call."""
    total = torch.zeros((), dtype=torch.float64, device=device)
    for _, part in owned_elements(chunks, mesh, grads=False):
        for piece in part.reshape(-1).split(_WIDENED_AT_ONCE):
            total += piece.double().square().sum()
    return collectives.all_reduce(total, mesh["world"]).sqrt().item()


@torch.no_grad()
def num_zeros_in_grad(chunks: Sequence[DistributedDataParallel], mesh: Mesh, device: torch.device | str) -> int:
    """Count the zeros in the whole model's gradient, after a step. One all-reduce of a scalar; every rank must call."""
    total = torch.zeros((), dtype=torch.int64, device=device)
    for _, part in owned_elements(chunks, mesh, grads=True):
        total += (part == 0).sum()
    return int(collectives.all_reduce(total, mesh["world"]).item())
