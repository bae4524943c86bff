"""What the ZeRO stages do differently: when gradients are summed, and when parameters are gathered. Two choices for a
chunk.

    stage         gradients                                parameters
    0, 1          ReduceOnce, at the end of a step         ParamGather, after the update
    2             ReduceEachMicrobatch                     ParamGather
    3             ReduceEachMicrobatch                     ParamFetcher (`fetch.py`), around each use
    0, 1, fixed   ReduceInFixedOrder (`fixed_order.py`)    ParamGather

Within a bucket the stages differ by what is there: a shard, or memory that comes and goes (`bucket.py`).
"""

from collections.abc import Iterable, Sequence

from torch import nn

from megatron.core.distributed.bucket import Bucket
from megatron.core.distributed.call_order import UseOrder
from megatron.core.distributed.slot import ParamSlot
from megatron.core.distributed.uses import Uses
from megatron.core.weight_grads import WeightGradStore


class GradReduce:
    """The gradients of a chunk on their way to sums. begun: no backward of the step is to follow; is_complete: they are
    summed."""

    sums_ends = False  # whether what two pipeline stages share is summed too

    def __init__(self, buckets: Sequence[Bucket], *, overlap: bool):
        self.buckets, self.overlap = buckets, overlap
        self.slots = [slot for bucket in buckets for slot in bucket.slots]
        for slot in self.slots:
            slot.reduce = self
        self.begun, self.is_complete = False, True
        self.learned = False  # whether a step has shown how many gradients each parameter gets
        self._num_microbatches: int | None = None  # of this step

    def begin_step(self, num_microbatches: int | None) -> None:
        """Forget the step before. A step of as many microbatches writes no more often; it may leave a layer out."""
        knows = self.is_complete and num_microbatches == self._num_microbatches
        self._num_microbatches = num_microbatches
        self.begun = self.is_complete = False
        for slot in self.slots:
            slot.expected, slot.added = max(slot.expected, slot.added) if knows else 0, 0
        self.learned = any(slot.expected for slot in self.slots)
        for bucket in self.buckets:
            bucket.begin_step()
            bucket.missing = sum(slot.expected > 0 or not self.learned for slot in bucket.slots)

    def begin_microbatch(self, microbatch: int, *, backward: bool) -> None:
        """A forward or a backward of it follows."""

    def open(self, slot: ParamSlot, *, overwrites: bool = False) -> bool:
        return slot.bucket.open_grad(slot, overwrites=overwrites)

    def put_off(self, slot: ParamSlot) -> None:
        self.open(slot)

    def add(self, slot: ParamSlot) -> None:
        """Of a step without gradients, as of validation, there was nothing to sum, and it goes on."""
        if self.begun and any(other.added for other in self.slots):
            raise RuntimeError(
                f"the gradient of {slot.name} was added to those of a step that are summed over the ranks already, where it "
                "would be counted otherwise than they are; call zero_grad_buffer() of each model chunk before the first "
                "forward of a step, and run all microbatches of the step in one call of get_forward_backward_func()"
            )
        if self.begun:
            self.begun = self.is_complete = False
        slot.added += 1

    def start(self) -> None:
        """Begin to sum what is not under way."""
        self.begun = True

    def finish(self) -> None:
        """This rank's part of each gradient is the sum over all samples of the step."""


class ReduceOnce(GradReduce):
    """Stages 0 and 1: all at the end of a step; with overlap, a bucket as soon as all its gradients are there."""

    def add(self, slot: ParamSlot) -> None:
        super().add(slot)
        if not (self.overlap and self.learned):
            return
        if slot.added > slot.expected:
            raise RuntimeError(
                f"the gradient of {slot.name} was written {slot.added} times in this step and {slot.expected} times at most "
                "in those before, so it may be on its way already; leave out --overlap-grad-reduce for such a model"
            )
        if slot.added == slot.expected:
            slot.bucket.missing -= 1
            self._start_complete()

    def _start_complete(self) -> None:
        """Begin to sum buckets in their order, which is the same on all ranks, up to the first incomplete one."""
        for bucket in self.buckets:
            if bucket.missing:
                return
            bucket.start_reduce()

    def start(self) -> None:
        super().start()
        for bucket in self.buckets:
            bucket.start_reduce()

    def finish(self) -> None:
        for bucket in self.buckets:
            bucket.finish_reduce()


class ReduceEachMicrobatch(GradReduce):
    """Stages 2 and 3: as soon as a microbatch's gradients of a bucket are complete, which `uses` tells, one bucket at a
    time."""

    def __init__(
        self,
        buckets: Sequence[Bucket],
        params: "ParamGather",
        uses: Uses,
        orders: Iterable[UseOrder],
        weight_grads: WeightGradStore,
        *,
        overlap: bool,
    ):
        super().__init__(buckets, overlap=overlap)
        self._params, self._uses = params, uses
        self._orders, self._weight_grads = list(orders), weight_grads
        self._travelling: Bucket | None = None

    def begin_step(self, num_microbatches: int | None) -> None:
        self._travelling = None
        self._uses.forget()
        for order in self._orders:
            order.forget()
        super().begin_step(num_microbatches)

    def begin_microbatch(self, microbatch: int, *, backward: bool) -> None:
        self._uses.begin(microbatch, backward=backward, puts_off=self._weight_grads.is_collecting)

    def put_off(self, slot: ParamSlot) -> None:
        if self._uses.passes(slot.bucket):
            self._params.passed(slot.bucket)

    def add(self, slot: ParamSlot) -> None:
        super().add(slot)
        slot.bucket.is_written = True
        self.put_off(slot)
        if self._uses.writes(slot.bucket):
            self._sum(slot.bucket)

    def _sum(self, bucket: Bucket) -> None:
        """Hand a microbatch's gradients on. A bucket that is written less often than expected is summed with the next
        microbatch, or at the end of the step; one that is written more often is summed twice."""
        if self._travelling is not None:
            self._travelling.finish_reduce()
        bucket.start_reduce()
        self._travelling = bucket
        if not self.overlap:
            bucket.finish_reduce()

    def start(self) -> None:
        super().start()
        for bucket in self.buckets:
            if bucket.is_written:
                bucket.start_reduce()
        for order in self._orders:
            order.end()

    def finish(self) -> None:
        self._uses.end()
        for bucket in self.buckets:
            bucket.finish_reduce()
            bucket.sum_over_replicas()


class ParamGather:
    """Stages 0 to 2: parameters are whole. With overlap, updated ones travel during the next forward, where modules
    wait for theirs."""

    def __init__(self, module: nn.Module, buckets: Sequence[Bucket], *, overlap: bool):
        self._buckets, self._overlap = buckets, overlap
        for owner in module.modules() if overlap else ():
            slots = [p.slot for p in owner.parameters(recurse=False) if hasattr(p, "slot")]
            if own := {slot.bucket for slot in slots}:
                owner.register_forward_pre_hook(lambda *_, own=own: [bucket.finish_gather() for bucket in own] and None)

    def begin_step(self) -> None:
        """Nothing that an error has left is in the way."""

    def begin_microbatch(self, *, backward: bool) -> None:
        """Nothing comes or goes."""

    def before_forward(self) -> None:
        for bucket in self._buckets:
            if bucket.buffer.is_tied:  # used by the output layer, which does not hold it
                bucket.finish_gather()

    def passed(self, bucket: Bucket) -> None:
        """They stay."""

    def updated(self) -> None:
        """Fetch what the other ranks have updated; with overlap begin, in the order of the next forward."""
        self.finish()
        for bucket in reversed(self._buckets):
            bucket.start_gather()
        if not self._overlap:
            self.finish()

    def finish(self) -> None:
        for bucket in self._buckets:
            bucket.finish_gather()
