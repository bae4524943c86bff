"""The parameters and gradients of a model, each element once over all ranks, and numbers of all of them.

A parameter's element is counted by the rank that owns it: `placement.owned_pieces` names the elements, and among
data-parallel
ranks the owner is the rank that updates the shard, or the first rank if all hold copies.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from megatron.core.distributed.buffer_plan import overlaps
from megatron.core.distributed.data_parallel import DistributedDataParallel
from megatron.core.offload.stored_tensor import loaded
from megatron.core.parallel import collectives
from megatron.core.parallel.mesh import Mesh
from megatron.core.sharding.boxes import flat_run, slices
from megatron.core.sharding.placement import owned_pieces


def my_elements(chunks: Sequence[DistributedDataParallel], mesh: Mesh, *, grads: bool) -> Iterator[tuple[str, Tensor]]:
    """(name, values) of the parameters, or gradients in the buffers, that this rank owns, in flat parts.

    Every element comes once over all ranks. Only elements that this rank updates are read, so a parameter all-gather may
    be in
    flight.
    """
    for chunk in chunks:
        for buffer in (b for b in chunk.buffers if b.axes.replica.is_first):
            values = buffer.sums if grads else buffer.owned_params
            for slot in buffer.plan.slots:
                parameter = buffer.parameters[slot.name]
                shape = tuple(parameter.shape)
                for _, local in owned_pieces(parameter.placement, shape, mesh):
                    first, last = (slot.start + at for at in flat_run(local, shape))
                    for start, stop in overlaps(buffer.owned, first, last):
                        yield from ((slot.name, part) for part in loaded(values.at(start, stop)))
        if not grads:
            for name, parameter in chunk.module.named_parameters():
                reduce_over = parameter.placement.reduce_over
                if not parameter.requires_grad and mesh.grad_axes(reduce_over).reduce.is_first:  # not in a buffer
                    for _, local in owned_pieces(parameter.placement, tuple(parameter.shape), mesh):
                        yield name, parameter.data[slices(local)]


_WIDENED_AT_ONCE = 2**24  # elements; their two float64 copies take 256 MB


@torch.no_grad()
def params_norm(chunks: Sequence[DistributedDataParallel], mesh: Mesh, device: torch.device | str) -> float:
    """L2 norm of all parameters of the model. One all-reduce of a scalar; every rank must call."""
    total = torch.zeros((), dtype=torch.float64, device=device)
    for _, part in my_elements(chunks, mesh, grads=False):
        for piece in part.reshape(-1).split(_WIDENED_AT_ONCE):
            total += piece.double().square().sum()
    return collectives.all_reduce(total, mesh["world"]).sqrt().item()


@torch.no_grad()
def num_zeros_in_grad(chunks: Sequence[DistributedDataParallel], mesh: Mesh, device: torch.device | str) -> int:
    """Zeros in the whole model's gradient, after a step. One all-reduce of a scalar; every rank must call."""
    total = torch.zeros((), dtype=torch.int64, device=device)
    for _, part in my_elements(chunks, mesh, grads=True):
        total += (part == 0).sum()
    return int(collectives.all_reduce(total, mesh["world"]).item())
