"""Gradients summed in one order for any number of ranks, so that runs in different layouts agree to the bit.

Floating-point sums depend on their order. Microbatch k of data-parallel rank r is number k * ranks + r of the step in
every layout. Here the gradients of each microbatch are stored apart and added in that order. It costs the memory of
all of them and one all-gather each: a tool to find where two runs diverge.
"""

from collections.abc import Sequence

from megatron.core.base.memory_category import memory_kind
from megatron.core.distributed.bucket import Bucket
from megatron.core.distributed.contiguous_buffers import MemoryBuffer, ParamAndGradBuffer
from megatron.core.distributed.param_grad_state import ParamSlot
from megatron.core.distributed.zero import GradReduce
from megatron.core.parallel import collectives
from megatron.core.parallel.grid import Axis


class ReduceInFixedOrder(GradReduce):
    """Stores each buffer's gradients by microbatch. ends: the axis of the first and last stage, which may share a
    table."""

    sums_ends = True

    def __init__(self, buckets: Sequence[Bucket], ends: Axis):
        super().__init__(buckets, overlap=False)
        self._ends = ends
        self._kept: dict[ParamAndGradBuffer, dict[int, MemoryBuffer]] = {bucket.buffer: {} for bucket in buckets}

    def begin_step(self, num_microbatches: int | None) -> None:
        self._forget()
        super().begin_step(num_microbatches)

    @memory_kind("gradients")
    def begin_microbatch(self, microbatch: int, *, backward: bool) -> None:
        """Point each `main_grad` to this microbatch's own gradients."""
        for buffer, kept in self._kept.items() if backward else ():
            if microbatch not in kept:
                kept[microbatch] = MemoryBuffer(buffer.grads.numel, buffer.grads.dtype, buffer.device)
            _point(buffer, kept[microbatch])

    def open(self, slot: ParamSlot, *, overwrites: bool = False) -> bool:
        return False  # the gradients of each microbatch begin as zeros

    @memory_kind("gradients")
    def finish(self) -> None:
        """Add up all microbatches of all data-parallel ranks into the buffers."""
        for buffer, kept in self._kept.items():
            for microbatch in sorted(kept):
                mine = kept[microbatch].data
                if buffer.is_tied:  # first the two stages' parts of one microbatch
                    collectives.all_reduce(mine, self._ends)
                for part in collectives.all_gather(mine, buffer.axes.reduce).split(mine.numel()):
                    buffer.grads.data.add_(part)
        self._forget()

    def _forget(self) -> None:
        for buffer, kept in self._kept.items():
            kept.clear()
            _point(buffer, buffer.grads)


def _point(buffer: ParamAndGradBuffer, grads: MemoryBuffer) -> None:
    for place in buffer.plan.slots:
        parameter = buffer.parameters[place.name]
        parameter.main_grad = grads.get(tuple(parameter.shape), place.start)
