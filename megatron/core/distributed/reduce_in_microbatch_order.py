"""Gradients summed in one order for any number of ranks, so that runs in different layouts agree to the bit.

Floating-point sums depend on their order. Microbatch k of data-parallel rank r is number k * ranks + r of the step in
every layout. Here the gradients of each microbatch are stored apart and added in that order. It costs the memory of
all of them and one all-gather each: a tool to find where two runs diverge.
"""

from collections.abc import Sequence

from megatron.core.base.label_allocations_by_memory_kind import memory_kind
from megatron.core.distributed.bucket_reduce_and_gather import Bucket
from megatron.core.distributed.contiguous_buffers import MemoryBuffer, ParamAndGradBuffer
from megatron.core.distributed.param_grad_state import ParamGradSink
from megatron.core.distributed.zero_stage_strategies import GradReduce
from megatron.core.parallel import collectives
from megatron.core.parallel.rank_grid import Axis


class ReduceInMicrobatchOrder(GradReduce):
    """Stores each buffer's gradients by microbatch.

    ends: the axis of the first and last stage, which may share an embedding.
    """

    sums_tied_embedding = True

    def __init__(self, buckets: Sequence[Bucket], ends: Axis):
        super().__init__(buckets, overlap=False)
        self._ends = ends
        # buffer -> microbatch -> its gradients, in the layout of the buffer
        self._microbatch_grads: dict[ParamAndGradBuffer, dict[int, MemoryBuffer]] = {b.buffer: {} for b in buckets}

    def begin_step(self, num_microbatches: int | None) -> None:
        self._forget()
        super().begin_step(num_microbatches)

    @memory_kind("gradients")
    def begin_microbatch(self, microbatch: int, *, backward: bool) -> None:
        """Point each `main_grad` to this microbatch's own gradients."""
        if not backward:
            return
        for buffer, grads_of in self._microbatch_grads.items():
            if microbatch not in grads_of:
                grads_of[microbatch] = MemoryBuffer(buffer.grads.numel, buffer.grads.dtype, buffer.device)
            _point_main_grads_to(grads_of[microbatch], buffer)

    def open(self, sink: ParamGradSink, *, overwrites: bool = False) -> bool:
        return False  # the gradients of each microbatch begin as zeros

    @memory_kind("gradients")
    def finish(self) -> None:
        """Add up all microbatches of all data-parallel ranks into the buffers."""
        for buffer, grads_of in self._microbatch_grads.items():
            for microbatch in sorted(grads_of):
                grads = grads_of[microbatch].data  # [buffer]
                if buffer.is_tied:  # first the two stages' parts of one microbatch
                    collectives.all_reduce(grads, self._ends)
                all_ranks = collectives.all_gather(grads, buffer.axes.reduce)  # [ranks x buffer]
                for rank_grads in all_ranks.split(grads.numel()):
                    buffer.grads.data.add_(rank_grads)
        self._forget()

    def _forget(self) -> None:
        for buffer, grads_of in self._microbatch_grads.items():
            grads_of.clear()
            _point_main_grads_to(buffer.grads, buffer)


def _point_main_grads_to(grads: MemoryBuffer, buffer: ParamAndGradBuffer) -> None:
    """Make each `main_grad` of the buffer's parameters a view of `grads`."""
    for param_range in buffer.plan.param_ranges:
        parameter = buffer.parameters[param_range.name]
        parameter.main_grad = grads.get(tuple(parameter.shape), param_range.start)
