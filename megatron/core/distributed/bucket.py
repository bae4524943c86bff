"""A bucket: the part of a buffer whose gradients are summed by one call, and whose parameters are gathered by one."""

from torch import Tensor, nn

from megatron.core import comm
from megatron.core.device import to_device
from megatron.core.distributed.buffer import ParamAndGradBuffer
from megatron.core.distributed.call_order import UseOrder
from megatron.core.distributed.released import ArrivingParameter, ReleasedGradient, ReleasedParameter, become
from megatron.core.distributed.slot import ParamSlot
from megatron.core.pending import Pending
from megatron.core.storage.stored import start_reading, start_writing


class Bucket:
    """Bucket `number` of a buffer. Every rank of the buffer's axes must make the same calls in the same order.

    order: who sees to it that ranks call alike, in stages 2 and 3. A bfloat16 copy of the gradients travels with
    --grad-reduce-in-bf16, and what comes back is widened.
    """

    def __init__(self, buffer: ParamAndGradBuffer, number: int, order: UseOrder | None = None):
        self.buffer, self.plan = buffer, buffer.plan.buckets[number]
        self.slots = [buffer.parameters[name].slot for name in self.plan.names]
        for slot in self.slots:
            slot.bucket = self
        start, stop = self.plan.start, self.plan.stop
        self._span, self._order = slice(start, stop), order
        self.missing = 0  # parameters that have fewer gradients in this step than expected
        self.is_written = False  # whether gradients were added since the last sum
        part = comm.my_part(stop - start, buffer.axes.shard)
        mine = (start + part.start, start + part.stop)
        self.sum, self.held_params = buffer.held_sums.at(*mine), buffer.held_params.at(*mine)
        self._rounds = buffer.config.grad_reduce_in_bf16 and buffer.axes.reduce.size > 1
        self._params = buffer.params_of[number] if buffer.params_of else None
        self._grads = buffer.grads_of[number] if buffer.grads_of else None
        self._holders = [slot.parameter for slot in self.slots]
        if self._params is not None:
            become(ReleasedParameter, self._holders)
        passes = self._grads is not None and not buffer.poison  # else whoever looks sees NaN
        self._passing_grads = [parameter.main_grad for parameter in self._holders] if passes else []
        become(ReleasedGradient, self._passing_grads)
        self._reducing: Pending[Tensor] | None = None
        self._gathering: Pending[Tensor] | None = None
        self._reading: Pending[Tensor] | None = None

    # ---------------------------------------------------------------- gradients

    def open_grad(self, slot: ParamSlot, *, overwrites: bool = False) -> bool:
        """Make ready for a gradient of one parameter: room in stages 2 and 3, and zeros to add to. True if the caller,
        who can overwrite, finds no zeros and must put the gradient in their place."""
        if self._grads is not None:
            self.finish_reduce()
            if not self._grads.is_open:
                self._grads.open()
                become(Tensor, self._passing_grads)
                self._clear()
        return slot.prepare(overwrites=overwrites)

    def _clear(self) -> None:
        """Set gradients to zero, but those that will be overwritten."""
        gradients, first = self.gradients, 0
        for slot in self.slots:
            slot.begin()
            if not slot.is_unset:
                continue
            gradients[first : slot.start].zero_()
            if self.buffer.poison:
                gradients[slot.start : slot.stop].fill_(float("nan"))
            first = slot.stop
        gradients[first:].zero_()

    @property
    def gradients(self) -> Tensor:
        """Those of its parameters, whole, where there are any."""
        return self.buffer.grads.data[self._span] if self._grads is None else self._grads.data

    def begin_step(self) -> None:
        """Nothing is written or under way, unless an error ended the step before, and then it is forgotten."""
        if self._reducing is not None:
            self._reducing.wait()
        self._reducing, self.is_written = None, False
        if self._grads is None:
            self._clear()
        else:
            self._release_grads()
            self.sum.zero_()

    def _release_grads(self) -> None:
        self._grads.release()
        become(ReleasedGradient, self._passing_grads)

    def start_reduce(self) -> None:
        """Begin to sum the gradients over the ranks, once."""
        if self._reducing is not None:
            return
        self._comes("sums the gradients")
        for slot in self.slots:
            if slot.is_unset:  # nobody came
                self.open_grad(slot)
        gradients = self.gradients.bfloat16() if self._rounds else self.gradients
        if not self.buffer.zero.shards_state:
            self._reducing = comm.start_all_reduce(gradients, self.buffer.axes.reduce)
        elif self.buffer.config.reduce_scatter_with_fp32_accumulation:
            self._reducing = comm.start_reduce_scatter_in(self.sum.dtype, gradients, self.buffer.axes.shard)
        else:
            self._reducing = comm.start_reduce_scatter(gradients, self.buffer.axes.shard)

    def finish_reduce(self) -> None:
        """`sum`, the rank's part, is summed over all ranks when this returns; in stages 2 and 3 over those of
        `axes.shard`, and added to what earlier microbatches gave."""
        if self._reducing is None:
            return
        total = self._reducing.wait()
        self._reducing, self.is_written = None, False
        if self._grads is not None:
            self.sum.add_(total)
            if self.buffer.poison:
                total.fill_(float("nan"))
            self._release_grads()
            return
        if self.buffer.zero.shards_state:
            comm.all_reduce(total, self.buffer.axes.replica)
        if self._rounds or self.buffer.zero.shards_state:
            self.sum.copy_(total)

    def sum_over_replicas(self) -> None:
        """Stages 2 and 3, end of step: reduce the shard over the other ranks (reduce-scatter if it is divided among
        them too)."""
        outer = self.buffer.axes.outer
        if outer.size > 1:
            self.sum[comm.my_part(self.sum.numel(), outer)].copy_(comm.reduce_scatter(self.sum, outer))
        else:
            comm.all_reduce(self.sum, self.buffer.axes.replica)

    def _comes(self, verb: str) -> None:
        """Before a call that a branch on data could keep the other ranks from."""
        if self._order is not None:
            others = len(self.plan.names) - 1
            self._order.comes(f"{verb} of {self.plan.names[0]}{f' and {others} more' if others else ''}")

    # ---------------------------------------------------------------- parameters

    def read_ahead(self) -> None:
        """Begin to read the own part from the file in which it may be kept (stage 3); a gather follows before any
        update."""
        if self._reading is None and self._gathering is None and not self._params.is_open:
            self._reading = start_reading(self.held_params)

    def gather_updated(self) -> None:
        """After an update: fetch what the other ranks of `axes.outer` have updated of what this rank holds."""
        outer = self.buffer.axes.outer
        mine = start_reading(self.held_params[comm.my_part(self.held_params.numel(), outer)]).wait()
        mine = to_device(mine, self.buffer.device)
        if isinstance(self.held_params, Tensor) and self.held_params.device == self.buffer.device:
            comm.start_all_gather(mine.clone(), outer, out=self.held_params).wait()
        else:
            start_writing(self.held_params, comm.all_gather(mine, outer)).wait()

    def start_gather(self) -> None:
        """Begin to fetch the other ranks' parts of the parameters."""
        if self._gathering is not None or (self._params is not None and self._params.is_open):
            return
        if self._params is not None:
            self._comes("gathers the parameters")
            reading, self._reading = self._reading or start_reading(self.held_params), None
            mine, out = to_device(reading.wait(), self.buffer.device), self._params.open()
            if self.buffer.axes.shard.size == 1:
                out.copy_(mine)
            self._gathering = comm.start_all_gather(mine, self.buffer.axes.shard, out=out)
        elif self.buffer.axes.shard.size > 1:
            mine = self.held_params.clone()  # which may not lie where the result goes
            self._gathering = comm.start_all_gather(
                mine, self.buffer.axes.shard, out=self.buffer.params.data[self._span]
            )
            become(ArrivingParameter, self._holders)

    def finish_gather(self) -> None:
        """The parameters are all there when this returns."""
        if self._gathering is not None:
            self._gathering.wait()
            self._gathering = None
            become(nn.Parameter, self._holders)

    def release_params(self) -> None:
        """Keep the held part only (stage 3)."""
        self.finish_gather()
        self._reading = None
        if self._params is not None and self._params.is_open:
            self._params.release()
            become(ReleasedParameter, self._holders)
