"""A bucket: the part of a buffer that one collective reduces or gathers.

Its gradients in one step (stages 0 and 1), or in one microbatch (stages 2 and 3):

    begin_step()          main_grads are zeros, or unset where a matrix product will overwrite them, or released
    open_grad(sink)       before each gradient: released memory is allocated, missing zeros are set
    start_reduce()        the collective starts: an all-reduce over all data-parallel ranks (stage 0), or a reduce-scatter
                          over `axes.shard`, to each rank's shard
    finish_reduce()       stages 0 and 1: `grad_shard` is the sum over all data-parallel ranks; stages 2 and 3 add the sum
                          over `axes.shard` to the earlier microbatches' sum, and release the gradients
    sum_over_replicas()   stages 2 and 3, once, at the end of the step: the shard is summed over its copies

Sums, not means: the step divides by its tokens later. Copies of a shard (replicas) are there only with hybrid sharding,
--num-distributed-optimizer-instances: `axes.shard` has the ranks that together hold one set of shards, `axes.replica` those
that hold equal ones, `axes.reduce` all of both. With --outer-dp-sharding-strategy optim the ranks that hold equal shards are
`axes.outer` instead, since each updates a part of the shard, and `axes.replica` has one rank. Without hybrid sharding
`axes.shard` has all data-parallel ranks. In stage 0 it has one rank: the shard is all.

`grad_shard` by stage:

    stage   memory of grad_shard                    after finish_reduce
    0       the bucket's gradients themselves       the sum over all ranks, in place (--grad-reduce-in-bf16: copied)
    1       this rank's part of the gradients       the sum, copied from the reduce-scatter's output; the other parts
                                                    keep this rank's own gradients
    2, 3    its own                                 the sum of all microbatches so far

With --main-grads-dtype bf16 the memory is its own in stage 1 too: the gradients are bfloat16, `grad_shard` is float32.

Its parameters:

    stage 0       nothing to do
    stage 1, 2    start_gather() after the update, finish_gather() before the next use
    stage 3       start_gather(), finish_gather() before each use of a unit, release_params() after it

A tensor whose memory is released, or is being written by a collective, has another class (`released_params_and_grads_guards.py`).
"""

from torch import Tensor, nn

from megatron.core.base.async_handle import AsyncHandle
from megatron.core.base.label_allocations_by_memory_kind import memory_kind
from megatron.core.distributed.contiguous_buffers import ParamAndGradBuffer, ParamBuffer
from megatron.core.distributed.param_grad_state import ParamGradSink, place_in_bucket
from megatron.core.distributed.released_params_and_grads_guards import (
    AllGatherPendingParameter,
    LazyZeroGradient,
    ReleasedGradient,
    ReleasedParameter,
    set_residency_class,
)
from megatron.core.distributed.zero_collective_order_check import CollectiveOrderCheck
from megatron.core.offload.tensor_in_memory_or_file import start_reading, start_writing
from megatron.core.parallel import collectives
from megatron.core.parallel.accelerator import to_device


class ParamBucket:
    """Bucket `number` of a buffer. By itself it holds frozen parameters of stage 3.

    All ranks of the buffer's axes must make the same calls in the same order. It does not decide when: the strategies of
    `zero_stage_strategies.py` call it. order: checks that the ranks agree, in stages 2 and 3.
    """

    def __init__(self, buffer: ParamBuffer, number: int, order: CollectiveOrderCheck | None = None):
        self.buffer = buffer
        self.plan = buffer.plan.buckets[number]
        self._parameters = [buffer.parameters[name] for name in self.plan.names]
        for parameter in self._parameters:
            place_in_bucket(parameter).bucket = self
        self._order = order

        # this rank's shard, flat, and all elements: a releasable buffer; None: they are a part of the buffer, and resident
        self._span = slice(self.plan.start, self.plan.stop)
        part = collectives.local_slice(self.plan.stop - self.plan.start, buffer.axes.shard)
        self._shard_run = self.plan.start + part.start, self.plan.start + part.stop
        self.param_shard = buffer.param_shard.at(*self._shard_run)
        self._params = buffer.params_of[number] if buffer.params_of else None
        if self._params is not None:
            set_residency_class(ReleasedParameter, self._parameters)
        buffer.buckets.append(self)

        # collectives and reads in flight
        self._gathering: AsyncHandle[Tensor] | None = None
        self._reading: AsyncHandle[Tensor] | None = None

    def _record_collective(self, verb: str) -> None:
        """Record a collective that a branch on data could keep other ranks from making."""
        if self._order is not None:
            others = len(self.plan.names) - 1
            more = f" and {others} more" if others else ""
            self._order.record(f"{verb} of {self.plan.names[0]}{more}")

    # ---------------------------------------------------------------- parameters, in the order of their use

    def read_ahead(self) -> None:
        """Start reading the own shard from its tier (stage 3). A gather must follow before the next update."""
        if self._reading is None and self._gathering is None and not self._params.is_open:
            self._reading = start_reading(self.param_shard)

    @memory_kind("communication")
    def start_gather(self) -> None:
        """Start the all-gather of the parameters, unless they are resident or in flight."""
        if self._gathering is not None or (self._params is not None and self._params.is_open):
            return
        shard_axis = self.buffer.axes.shard
        if self._params is not None:
            # stage 3: from the shard's storage into memory that is allocated now
            self._record_collective("gathers the parameters")
            reading = self._reading or start_reading(self.param_shard)
            self._reading = None
            own_shard = to_device(reading.wait(), self.buffer.device)  # [shard]
            out = self._params.open()  # [bucket]
            # Communication over one rank does nothing, not even a copy.
            if shard_axis.size == 1:
                out.copy_(own_shard)
            self._gathering = collectives.start_all_gather(own_shard, shard_axis, out=out)
        elif shard_axis.size > 1:
            # stages 1 and 2: in place
            own_shard = self.param_shard.clone()  # the input of an all-gather may not overlap its output
            out = self.buffer.params.data[self._span]  # [bucket]
            self._gathering = collectives.start_all_gather(own_shard, shard_axis, out=out)
            # A forward that uses one outside its module, where no hook waits, waits by its class.
            set_residency_class(AllGatherPendingParameter, self._parameters)

    @memory_kind("communication")
    def finish_gather(self) -> None:
        """Wait until all parameters are resident."""
        if self._gathering is not None:
            self._gathering.wait()
            self._gathering = None
            set_residency_class(nn.Parameter, self._parameters)

    def release_params(self) -> None:
        """Release all but this rank's shard (stage 3)."""
        self.finish_gather()
        self._reading = None
        if self._params is not None and self._params.is_open:
            self._params.release()
            set_residency_class(ReleasedParameter, self._parameters)

    @memory_kind("communication")
    def keep_values(self) -> None:
        """Write the resident parameters, which a script has changed, into this rank's shard (stage 3)."""
        if self._params is not None and self._params.is_open:
            part = collectives.local_slice(self._params.data.numel(), self.buffer.axes.shard)
            start_writing(self.param_shard, self._params.data[part].clone()).wait()

    @memory_kind("communication")
    def gather_updated(self) -> None:
        """All-gather this rank's shard over `axes.outer` after an update, of which each rank has made a part."""
        outer = self.buffer.axes.outer
        owned = start_reading(self.param_shard[collectives.local_slice(self.param_shard.numel(), outer)]).wait()
        owned = to_device(owned, self.buffer.device)  # [shard / outer.size]
        if isinstance(self.param_shard, Tensor) and self.param_shard.device == self.buffer.device:
            # Cloned: the input of an all-gather may not overlap its output.
            collectives.start_all_gather(owned.clone(), outer, out=self.param_shard).wait()
        else:
            start_writing(self.param_shard, collectives.all_gather(owned, outer)).wait()


class Bucket(ParamBucket):
    """A bucket of trained parameters, with their gradients.

    With --grad-reduce-in-bf16 a bfloat16 copy of the gradients is sent, and the result is widened.
    """

    buffer: ParamAndGradBuffer

    def __init__(self, buffer: ParamAndGradBuffer, number: int, order: CollectiveOrderCheck | None = None):
        super().__init__(buffer, number, order)
        self.sinks = [parameter.grad_sink for parameter in self._parameters]

        # counts of this step
        self.missing = 0  # parameters that have fewer gradients in this step than expected; `zero.py` counts
        self.is_written = False  # gradients were added since the last reduction; set by `zero.py`, in stages 2 and 3

        # this rank's shard, flat, and all gradients: a releasable buffer; None: they are a part of the buffer and stay resident.
        # They are releasable in stages 2 and 3, and lazily allocated ones: on a CPU where no other rank adds to them.
        self.grad_shard = buffer.grad_shard.at(*self._shard_run)
        self._grads = buffer.grads_of[number] if buffer.grads_of else None
        self._main_grads = [parameter.main_grad for parameter in self._parameters]
        self._shards_grads = buffer.zero.shards_grads
        self._reduces_in_bf16 = buffer.config.grad_reduce_in_bf16 and buffer.axes.reduce.size > 1
        self._is_opened = False  # gradients were allocated in this step
        if self._shards_grads:
            self._mark_grads_released()
        self._reducing: AsyncHandle[Tensor] | None = None  # the reduction in flight

    # ---------------------------------------------------------------- gradients, in the order of a step

    def begin_step(self) -> None:
        """Forget everything of the last step, which may have ended in an error. It communicates nothing new.

        stages 2 and 3                  gradients released; `grad_shard` is zeros
        lazily allocated, used before   gradients released until the first gradient of this step (not with `keeps_grads`)
        otherwise                       gradients stay, and are cleared; released ones stay released
        """
        if self._reducing is not None:
            # After an error a collective may still be writing into these buffers. Its result is dropped.
            self._reducing.wait()
        self._reducing = None
        self.is_written = False
        if self._shards_grads:
            self._release_grads()
            self.grad_shard.zero_()
        elif self.buffer.grads_need_no_buffer and self._is_opened and not self.buffer.keeps_grads:
            self._release_grads()
        elif self._grads is None or self._grads.is_open:  # released gradients have nothing to clear
            self._clear()
        self._is_opened = False

    def open_grad(self, sink: ParamGradSink, *, overwrites: bool = False) -> bool:
        """Prepare `main_grad` of one parameter for a gradient: allocate it if it is released, set zeros if it is unset.

        overwrites: the caller is a matrix product that can overwrite `main_grad`, which then needs no zeros. Returns True
        if it must: `main_grad` is unset. Else, also without `overwrites`, the caller adds. The memory is that of the whole
        bucket: its first gradient allocates it for all of its parameters.
        """
        if self._shards_grads:
            # A sum in flight reads the memory that the next gradient will be written to, so it ends here at the latest;
            # its end releases that memory. As a rule none is left: `zero_stage_strategies.py` ends it before it starts
            # the next bucket's sum, in the same backward, and without overlap at once.
            self.finish_reduce()
        self.open()
        return sink.prepare(overwrites=overwrites)

    def open(self) -> None:
        """Allocate the bucket's released gradients, and clear them. Resident ones, perhaps with values, stay as they are."""
        self._is_opened = True
        if self._grads is not None and not self._grads.is_open:
            self._grads.open()
            set_residency_class(Tensor, self._main_grads)
            self._clear()

    def complete(self) -> None:
        """Set zeros where this step has added no gradient, before the sum or the update reads them.

        In stages 2 and 3, where gradients are cleared each time they are allocated, it is those of one microbatch.
        Allocates a released bucket that got no gradient at all: of lazy gradients, which the update reads. Stages 2 and
        3 do not reduce such a bucket.
        """
        self.open()
        for sink in self.sinks:
            if sink.is_unset:
                self.open_grad(sink)

    @memory_kind("communication")
    def start_reduce(self) -> None:
        """Start the sum over the ranks. While one is in flight, a call changes nothing.

        Until `finish_reduce`, the gradients must not be read or written, and `grad_shard` has no result yet.
        """
        if self._reducing is not None:
            return
        self._record_collective("sums the gradients")
        self.complete()
        gradients = self.gradients  # [bucket]
        if self._reduces_in_bf16:
            gradients = gradients.bfloat16()  # a copy, unless they are bfloat16; what is sent is summed
        # Copies of shards are not part of these reduce-scatters: `finish_reduce` or `sum_over_replicas` sums over them.
        if not self.buffer.zero.shards_state:
            # stage 0: in place
            self._reducing = collectives.start_all_reduce(gradients, self.buffer.axes.reduce)  # [bucket]
        elif self.buffer.config.reduce_scatter_with_fp32_accumulation:
            # an all-to-all of the bfloat16 gradients, which each rank sums in float32
            shard = self.buffer.axes.shard
            self._reducing = collectives.start_reduce_scatter_in(self.grad_shard.dtype, gradients, shard)  # [shard]
        else:
            self._reducing = collectives.start_reduce_scatter(gradients, self.buffer.axes.shard)  # [shard]

    @memory_kind("communication")
    def finish_reduce(self) -> None:
        """Wait until `grad_shard` is reduced: in stages 0 and 1 over all ranks, in stages 2 and 3 over `axes.shard`.

        In stages 2 and 3 the sum of a microbatch is added to those of earlier ones. Without a sum in flight nothing
        happens.
        """
        if self._reducing is None:
            return
        total = self._reducing.wait()  # [shard], in stage 0 [bucket]
        self._reducing = None
        self.is_written = False

        # stages 2 and 3: sums of shards accumulate over microbatches; whole gradients are not kept from one to the next.
        # Copies of the shard wait for the end of the step.
        if self._shards_grads:
            self.grad_shard.add_(total)
            if self.buffer.poison:
                total.fill_(float("nan"))
            self._release_grads()
            return

        # stages 0 and 1; an all-reduce of the gradients themselves has summed in place, over all ranks
        if self.buffer.zero.shards_state:
            # Stage 1 with hybrid sharding: over the copies of the shard, waited for here, in the dtype of `total`: as it
            # was sent, but float32 where bfloat16 was sent and summed wide (reduce_scatter_with_fp32_accumulation).
            collectives.all_reduce(total, self.buffer.axes.replica)
        if self._reduces_in_bf16 or self.buffer.zero.shards_state:
            self.grad_shard.copy_(total)

    @memory_kind("communication")
    def sum_over_replicas(self) -> None:
        """Sum the shard over its copies at the end of a step (stages 2 and 3).

        It is a reduce-scatter where the outer axis shards it again, else an all-reduce. Without copies (no hybrid sharding)
        the axis of either has one rank, and nothing is sent.
        Once a step and not once a microbatch: sums over copies can wait until all microbatches are added. Every rank must
        call it for every bucket, also for one that got no gradient. It is not in flight beside anything.
        """
        outer = self.buffer.axes.outer
        if outer.size > 1:
            # Only the part that this rank updates gets its sum; the rest of the shard keeps a part of the sum.
            owned = collectives.local_slice(self.grad_shard.numel(), outer)
            self.grad_shard[owned].copy_(collectives.reduce_scatter(self.grad_shard, outer))
        else:
            collectives.all_reduce(self.grad_shard, self.buffer.axes.replica)

    @property
    def gradients(self) -> Tensor:
        """The gradients of all of the bucket's parameters, flat [bucket]; they must be resident."""
        if self._grads is None:
            return self.buffer.grads.data[self._span]
        return self._grads.data

    def _clear(self) -> None:
        """Set gradients to zero, except where a product will overwrite them: these parameters are unset from here on.

        Such a parameter is one whose first gradient came from a product after an earlier call: in an earlier step, or, in
        stages 2 and 3, which clear gradients each time they are allocated, in an earlier microbatch.
        """
        gradients = self.gradients
        first = 0  # everything before it is done
        for sink in self.sinks:
            sink.begin()
            if not sink.is_unset:
                continue
            gradients[first : sink.start].zero_()
            if self.buffer.poison:
                # A read before the product has written shows as NaN.
                gradients[sink.start : sink.stop].fill_(float("nan"))
            first = sink.stop
        gradients[first:].zero_()

    def _release_grads(self) -> None:
        self._grads.release()
        self._mark_grads_released()

    def _mark_grads_released(self) -> None:
        if self.buffer.grads_need_no_buffer:
            set_residency_class(LazyZeroGradient, self._main_grads)
        elif not self.buffer.poison:  # poisoned gradients read as NaN without a class
            set_residency_class(ReleasedGradient, self._main_grads)
