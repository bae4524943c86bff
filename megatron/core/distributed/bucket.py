"""A bucket: the part of a buffer that one collective reduces or gathers."""

from torch import Tensor, nn

from megatron.core.base.async_handle import Pending
from megatron.core.base.memory_category import memory_kind
from megatron.core.distributed.collective_order import UseOrder
from megatron.core.distributed.contiguous_buffers import ParamAndGradBuffer
from megatron.core.distributed.param_grad_state import ParamSlot
from megatron.core.distributed.released_tensors import (
    ArrivingParameter,
    LateGradient,
    ReleasedGradient,
    ReleasedParameter,
    become,
)
from megatron.core.offload.stored_tensor import start_reading, start_writing
from megatron.core.parallel import collectives
from megatron.core.parallel.accelerator import to_device


class Bucket:
    """Bucket `number` of a buffer. All ranks of the buffer's axes must make the same calls in the same order.

    order: checks that they do, in stages 2 and 3. With --grad-reduce-in-bf16 a bfloat16 copy of the gradients is sent,
    and the result is widened.
    """

    def __init__(self, buffer: ParamAndGradBuffer, number: int, order: UseOrder | None = None):
        self.buffer, self.plan = buffer, buffer.plan.buckets[number]
        self.slots = [buffer.parameters[name].slot for name in self.plan.names]
        for slot in self.slots:
            slot.bucket = self
        start, stop = self.plan.start, self.plan.stop
        self._span, self._order = slice(start, stop), order
        self.missing = 0  # parameters that have fewer gradients in this step than expected
        self.is_written = False  # gradients were added since the last reduction
        part = collectives.my_part(stop - start, buffer.axes.shard)
        mine = (start + part.start, start + part.stop)
        self.sum, self.held_params = buffer.held_sums.at(*mine), buffer.held_params.at(*mine)
        self._rounds = buffer.config.grad_reduce_in_bf16 and buffer.axes.reduce.size > 1
        self._params = buffer.params_of[number] if buffer.params_of else None
        self._grads = buffer.grads_of[number] if buffer.grads_of else None
        self._holders = [slot.parameter for slot in self.slots]
        self._gradients = [parameter.main_grad for parameter in self._holders]
        self._passes, self._is_opened = buffer.zero.passes_grads, False
        buffer.buckets.append(self)
        if self._params is not None:
            become(ReleasedParameter, self._holders)
        if self._passes:
            self._away()
        self._reducing: Pending[Tensor] | None = None
        self._gathering: Pending[Tensor] | None = None
        self._reading: Pending[Tensor] | None = None

    # ---------------------------------------------------------------- gradients

    def open_grad(self, slot: ParamSlot, *, overwrites: bool = False) -> bool:
        """Prepare `main_grad` of one parameter for a gradient: allocate it if it is transient, and set zeros to add to.

        Returns True if `overwrites` is given and the caller must overwrite instead of adding.
        """
        if self._passes:
            # The sum in flight reads the memory that the next gradient will be written to, so it ends first.
            self.finish_reduce()
        self.open()
        return slot.prepare(overwrites=overwrites)

    def open(self) -> None:
        """Allocate transient gradients that are not there, and clear them."""
        self._is_opened = True
        if self._grads is not None and not self._grads.is_open:
            self._grads.open()
            become(Tensor, self._gradients)
            self._clear()

    def complete(self) -> None:
        """Set zeros where no gradient of this step has come."""
        self.open()
        for slot in self.slots:
            if slot.is_unset:
                self.open_grad(slot)

    def _clear(self) -> None:
        """Set gradients to zero, except where a product will overwrite them."""
        gradients, first = self.gradients, 0
        for slot in self.slots:
            slot.begin()
            if not slot.is_unset:
                continue
            gradients[first : slot.start].zero_()
            if self.buffer.poison:
                # A reader of what no product has written yet shows as NaN.
                gradients[slot.start : slot.stop].fill_(float("nan"))
            first = slot.stop
        gradients[first:].zero_()

    @property
    def gradients(self) -> Tensor:
        """The whole gradients of the bucket's parameters; they must be resident."""
        return self.buffer.grads.data[self._span] if self._grads is None else self._grads.data

    def begin_step(self) -> None:
        """Forget everything of the last step, which may have ended in an error."""
        if self._reducing is not None:
            # After an error a collective may still be writing into these buffers.
            self._reducing.wait()
        self._reducing, self.is_written = None, False
        if self._passes:
            self._release_grads()
            self.sum.zero_()
        elif self.buffer.grads_come_late and self._is_opened and not self.buffer.keeps_grads:
            self._release_grads()
        else:
            self._clear()
        self._is_opened = False

    def _release_grads(self) -> None:
        self._grads.release()
        self._away()

    def _away(self) -> None:
        if self.buffer.grads_come_late:
            become(LateGradient, self._gradients)
        elif not self.buffer.poison:  # poisoned gradients read as NaN without a class
            become(ReleasedGradient, self._gradients)

    @memory_kind("communication")
    def start_reduce(self) -> None:
        """Start the sum over the ranks. A second call changes nothing."""
        if self._reducing is not None:
            return
        self._comes("sums the gradients")
        self.complete()
        gradients = self.gradients.bfloat16() if self._rounds else self.gradients
        if not self.buffer.zero.shards_state:
            self._reducing = collectives.start_all_reduce(gradients, self.buffer.axes.reduce)
        elif self.buffer.config.reduce_scatter_with_fp32_accumulation:
            self._reducing = collectives.start_reduce_scatter_in(self.sum.dtype, gradients, self.buffer.axes.shard)
        else:
            self._reducing = collectives.start_reduce_scatter(gradients, self.buffer.axes.shard)

    @memory_kind("communication")
    def finish_reduce(self) -> None:
        """Wait until `sum`, this rank's shard, is reduced: over all ranks, or in stages 2 and 3 over `axes.shard`,
        where the sum of a microbatch is added to those of earlier ones."""
        if self._reducing is None:
            return
        total = self._reducing.wait()
        self._reducing, self.is_written = None, False
        if self._passes:
            # Sharded sums add up here, over microbatches; whole gradients are not kept from one to the next.
            self.sum.add_(total)
            if self.buffer.poison:
                total.fill_(float("nan"))
            self._release_grads()
            return
        if self.buffer.zero.shards_state:
            collectives.all_reduce(total, self.buffer.axes.replica)  # hybrid sharding: over the copies of the shard
        if self._rounds or self.buffer.zero.shards_state:
            self.sum.copy_(total)

    @memory_kind("communication")
    def sum_over_replicas(self) -> None:
        """Stages 2 and 3, end of step: reduce the shard over the outer axis (reduce-scatter if the shard is cut there
        too)."""
        outer = self.buffer.axes.outer
        if outer.size > 1:
            # Once a step and not once a microbatch: sums over copies can wait until all are added.
            self.sum[collectives.my_part(self.sum.numel(), outer)].copy_(collectives.reduce_scatter(self.sum, outer))
        else:
            collectives.all_reduce(self.sum, self.buffer.axes.replica)

    def _comes(self, verb: str) -> None:
        """Announce a collective that a branch on data could keep other ranks from making."""
        if self._order is not None:
            others = len(self.plan.names) - 1
            self._order.comes(f"{verb} of {self.plan.names[0]}{f' and {others} more' if others else ''}")

    # ---------------------------------------------------------------- parameters

    def read_ahead(self) -> None:
        """Start reading the own shard from its tier (stage 3). A gather must follow before the next update."""
        if self._reading is None and self._gathering is None and not self._params.is_open:
            self._reading = start_reading(self.held_params)

    @memory_kind("communication")
    def gather_updated(self) -> None:
        """After an update: all-gather, over `axes.outer`, the shard that this rank holds."""
        outer = self.buffer.axes.outer
        mine = start_reading(self.held_params[collectives.my_part(self.held_params.numel(), outer)]).wait()
        mine = to_device(mine, self.buffer.device)
        if isinstance(self.held_params, Tensor) and self.held_params.device == self.buffer.device:
            # Cloned: the input of an all-gather may not overlap its output.
            collectives.start_all_gather(mine.clone(), outer, out=self.held_params).wait()
        else:
            start_writing(self.held_params, collectives.all_gather(mine, outer)).wait()

    @memory_kind("communication")
    def start_gather(self) -> None:
        """Start the all-gather of the parameters, unless they are resident or in flight."""
        if self._gathering is not None or (self._params is not None and self._params.is_open):
            return
        if self._params is not None:
            self._comes("gathers the parameters")
            reading, self._reading = self._reading or start_reading(self.held_params), None
            mine, out = to_device(reading.wait(), self.buffer.device), self._params.open()
            # Communication over one rank does nothing, not even a copy.
            if self.buffer.axes.shard.size == 1:
                out.copy_(mine)
            self._gathering = collectives.start_all_gather(mine, self.buffer.axes.shard, out=out)
        elif self.buffer.axes.shard.size > 1:
            mine = self.held_params.clone()  # the input of an all-gather may not overlap its output
            self._gathering = collectives.start_all_gather(
                mine, self.buffer.axes.shard, out=self.buffer.params.data[self._span]
            )
            # A forward that uses one outside its module, where no hook waits, waits by its class.
            become(ArrivingParameter, self._holders)

    @memory_kind("communication")
    def finish_gather(self) -> None:
        """Wait until all parameters are resident."""
        if self._gathering is not None:
            self._gathering.wait()
            self._gathering = None
            become(nn.Parameter, self._holders)

    @memory_kind("communication")
    def keep_values(self) -> None:
        """Stage 3: the resident parameters, which a script has changed, take the place of this rank's shard."""
        if self._params is not None and self._params.is_open:
            mine = self._params.data[collectives.my_part(self._params.data.numel(), self.buffer.axes.shard)].clone()
            start_writing(self.held_params, mine).wait()

    def release_params(self) -> None:
        """Release all but this rank's shard (stage 3)."""
        self.finish_gather()
        self._reading = None
        if self._params is not None and self._params.is_open:
            self._params.release()
            become(ReleasedParameter, self._holders)
