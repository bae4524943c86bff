"""Gradients summed in one order for every number of ranks, so that runs which differ in layout only agree to the bit.

Floating-point sums depend on their order. Microbatch k of data-parallel rank r is number k * ranks + r of the step,
whatever the ranks are; here each one's gradients are kept apart, and added up by that number. It costs the memory of
all of them and an all-gather of each: a tool for finding where two runs part.
"""

from megatron.core import comm
from megatron.core.distributed.memory_buffer import MemoryBuffer, ParamAndGradBuffer
from megatron.core.grid import Axis


class MicrobatchGrads:
    """The gradients of one buffer, microbatch by microbatch."""

    def __init__(self, buffer: ParamAndGradBuffer):
        self.buffer = buffer
        self._kept: dict[int, MemoryBuffer] = {}

    def begin(self, microbatch: int) -> None:
        """Direct what is written from now on to this microbatch's own gradients."""
        grads = self.buffer.grads
        if microbatch not in self._kept:
            self._kept[microbatch] = MemoryBuffer(grads.numel, grads.dtype, grads.data.device)
        self._point_to(self._kept[microbatch])

    def sum_in_order(self, ends: Axis | None) -> None:
        """Put the sum over all microbatches of all data-parallel ranks into the buffer. Every rank of the axes must
        call.

        ends: first and last stage, if both hold this tensor; their parts of a microbatch are added first.
        """
        total, axis = self.buffer.grads.data, self.buffer.axes.reduce
        for microbatch in sorted(self._kept):
            mine = self._kept[microbatch].data
            if ends is not None:
                comm.all_reduce(mine, ends)
            for part in comm.all_gather(mine, axis).split(mine.numel()):
                total.add_(part)
        self.forget()

    def forget(self) -> None:
        """Keep no microbatch's gradients."""
        self._kept.clear()
        self._point_to(self.buffer.grads)

    def _point_to(self, grads: MemoryBuffer) -> None:
        for slot in self.buffer.plan.slots:
            parameter = self.buffer.parameters[slot.name]
            parameter.main_grad = grads.get(tuple(parameter.shape), slot.start)
