"""The data-parallel copies of a chunk's persistent buffers agree at the end of each step.

    construction    gives every "copy" buffer the first rank's value
    begin_step      remembers the values of buffers whose changes are added ("sum")
    end_step        after the last backward: one broadcast for all "copy" buffers, and one all-reduce for the others of
                    each rule and dtype; then `end_of_step` of each module that has one

Each rule is `sharding/buffer_placement_and_sync.py: BufferPlacement`. A chunk without persistent buffers communicates
nothing.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from megatron.core.parallel import collectives
from megatron.core.parallel.mesh import Mesh
from megatron.core.parallel.rank_grid import Axis
from megatron.core.sharding.buffer_placement_and_sync import PersistentBuffer, persistent_buffers


class ChangesAtStepEnd(nn.Module):
    """A module with state that changes once a step: scales from the largest values seen, a router's bias from its loads."""

    def end_of_step(self) -> None:
        """Change the state. Called on every rank when the gradients are complete and the buffers of all ranks agree.

        Also called for a step whose update is then left out, such as one that overflows the loss scale.
        """
        raise NotImplementedError


class BufferSync:
    """The agreement of one chunk's buffers. Every rank of the chunk's data- and tensor-parallel groups makes each call."""

    def __init__(self, module: nn.Module, mesh: Mesh):
        self._mesh = mesh
        # Found once: a walk over all modules takes longer than everything else here in a small step.
        self.buffers = list(persistent_buffers(module))
        self._change_at_step_end = [child for child in module.modules() if isinstance(child, ChangesAtStepEnd)]
        self._at_start: dict[str, Tensor] = {}  # by name, of buffers with sync "sum": any shape
        self._copy(self._with("copy"))

    def begin_step(self) -> None:
        """Note the values to which a step's changes are added."""
        self._at_start = {buffer.name: buffer.tensor.detach().clone() for buffer in self._with("sum")}

    def end_step(self) -> None:
        """Make the copies agree, then let modules change the state that follows from it."""
        self._copy(self._with("copy"))
        for sync in ("sum", "mean", "max"):
            for axis, group in self._by_axis(self._with(sync)):
                for dtype in sorted({buffer.tensor.dtype for buffer in group}, key=str):
                    self._reduce(sync, axis, [buffer for buffer in group if buffer.tensor.dtype == dtype])
        for module in self._change_at_step_end:
            module.end_of_step()

    def _with(self, sync: str) -> list[PersistentBuffer]:
        return [buffer for buffer in self.buffers if buffer.declared.sync == sync and buffer.has_elements]

    def _copy(self, buffers: Sequence[PersistentBuffer]) -> None:
        """Broadcast from the first rank of each axis over which copies may differ."""
        for reduce_over in sorted({buffer.placement.reduce_over for buffer in buffers}):
            group = [buffer for buffer in buffers if buffer.placement.reduce_over == reduce_over]
            _broadcast(group, self._mesh.grad_axes(reduce_over).reduce)
        for name in sorted({axis for buffer in buffers for axis in buffer.placement.replicated_over} & {"tp"}):
            _broadcast([buffer for buffer in buffers if name in buffer.placement.replicated_over], self._mesh[name])

    def _by_axis(self, buffers: Sequence[PersistentBuffer]) -> list[tuple[Axis, list[PersistentBuffer]]]:
        """Return the axes over which values are combined, each with its buffers, in one order on all ranks."""
        result = []
        for reduce_over in sorted({buffer.placement.reduce_over for buffer in buffers}):
            axis = self._mesh.grad_axes(reduce_over).reduce
            result.append((axis, [buffer for buffer in buffers if buffer.placement.reduce_over == reduce_over]))
        for name in sorted({axis for buffer in buffers for axis in buffer.placement.partial_grad}):
            result.append((self._mesh[name], [b for b in buffers if name in b.placement.partial_grad]))
        return [(axis, group) for axis, group in result if axis.size > 1]

    def _reduce(self, sync: str, axis: Axis, buffers: Sequence[PersistentBuffer]) -> None:
        """Combine buffers of one dtype over the axis, in one message."""
        parts = []
        for buffer in buffers:
            value = buffer.tensor.detach()
            if sync == "sum":
                value = value - self._at_start.get(buffer.name, torch.zeros_like(value))
            parts.append(value.reshape(-1))
        flat = collectives.all_reduce(torch.cat(parts), axis, "max" if sync == "max" else "sum")
        if sync == "mean":
            flat = flat / axis.size  # [elements]
        for buffer, total in zip(buffers, flat.split([part.numel() for part in parts]), strict=True):
            total = total.view(buffer.tensor.shape)
            if sync == "sum":
                total = total + self._at_start.get(buffer.name, torch.zeros_like(total))
            buffer.tensor.detach().copy_(total)


def _broadcast(buffers: Sequence[PersistentBuffer], axis: Axis) -> None:
    """Give buffers of any dtypes the values of the axis's first rank, in one message of their bytes."""
    if axis.size == 1 or not buffers:
        return
    values = [buffer.tensor.detach().contiguous().view(-1).view(torch.uint8) for buffer in buffers]
    flat = torch.cat(values)
    collectives.broadcast(flat, axis)
    for buffer, data in zip(buffers, flat.split([value.numel() for value in values]), strict=True):
        value = buffer.tensor.detach()
        value.copy_(data.clone().view(value.dtype).view(value.shape))
