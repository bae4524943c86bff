"""The ZeRO stages as two strategies per chunk: when gradients are reduced, and when parameters are gathered.

    stage         gradients                                parameters
    0, 1          ReduceOnce, at the end of a step         ParamGather, after the update
    2             ReduceEachMicrobatch                     ParamGather
    3             ReduceEachMicrobatch                     ParamFetcher (`zero3_param_fetcher.py`), around each use
    0, 1, fixed   ReduceInFixedOrder (`fixed_order_reduce.py`)    ParamGather

Inside a bucket (`bucket.py`) the stages differ by its memory: with or without shards, permanent or transient.
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

from torch import nn

from megatron.core.distributed.bucket import Bucket
from megatron.core.distributed.collective_order import UseOrder
from megatron.core.distributed.grad_count import Uses
from megatron.core.distributed.param_grad_state import ParamSlot
from megatron.core.ops.deferred_wgrad import WeightGradStore
from megatron.core.ops.main_grad_interface import slot_of


class GradReduce:
    """Base of the gradient strategies. begun: no backward of the step follows; is_complete: the gradients are
    reduced."""

    sums_ends = False  # whether the strategy also sums a table that two pipeline stages share

    def __init__(self, buckets: Sequence[Bucket], *, overlap: bool):
        self.buckets, self.overlap = buckets, overlap
        self.slots = [slot for bucket in buckets for slot in bucket.slots]
        for slot in self.slots:
            slot.reduce = self
        self.begun, self.is_complete = False, True
        self.learned = False  # whether a step has shown how many gradients each parameter gets
        self._num_microbatches: int | None = None  # of this step

    @property
    def has_gradients(self) -> bool:
        """Whether the step has any yet; validation has none."""
        return any(slot.added for slot in self.slots)

    def begin_step(self, num_microbatches: int | None) -> None:
        """Forget the last step. With an equal number of microbatches, a parameter gets at most the gradients it got
        before."""
        knows = self.is_complete and num_microbatches == self._num_microbatches
        self._num_microbatches = num_microbatches
        self.begun = self.is_complete = False
        for slot in self.slots:
            slot.expected, slot.added = max(slot.expected, slot.added) if knows else 0, 0
        self.learned = any(slot.expected for slot in self.slots)
        for bucket in self.buckets:
            bucket.begin_step()
            # Before the counts are learned, every parameter is expected, and no bucket starts early.
            bucket.missing = sum(slot.expected > 0 or not self.learned for slot in bucket.slots)

    def begin_microbatch(self, microbatch: int, *, backward: bool) -> None:
        """Called before a forward or backward of the microbatch."""

    def open(self, slot: ParamSlot, *, overwrites: bool = False) -> bool:
        return slot.bucket.open_grad(slot, overwrites=overwrites)

    def put_off(self, slot: ParamSlot) -> None:
        self.open(slot)

    def add(self, slot: ParamSlot) -> None:
        """Count a gradient. Raises RuntimeError after the reduction began; a step without gradients, such as
        validation, may continue."""
        # Validation begins and ends a step without gradients; training may then add to it.
        if self.begun and self.has_gradients:
            raise RuntimeError(
                f"the gradient of {slot.name} was added after the gradients of its step were reduced over the ranks; call "
                "zero_grad_buffer() of each model chunk before the first forward of a step, and run all microbatches of the "
                "step in one call of get_forward_backward_func()"
            )
        if self.begun:
            self.begun = self.is_complete = False
        slot.added += 1

    def start(self) -> None:
        """Start every reduction that is not in flight."""
        self.begun = True

    def finish(self) -> None:
        """Wait until this rank's shard of each gradient is the sum over all samples of the step."""


class ReduceOnce(GradReduce):
    """Stages 0 and 1: reduce at the end of a step; with overlap, each bucket as soon as its gradients are complete."""

    def add(self, slot: ParamSlot) -> None:
        super().add(slot)
        if not (self.overlap and self.learned):
            return
        if slot.added > slot.expected:
            raise RuntimeError(
                f"the gradient of {slot.name} was written {slot.added} times in this step and at most {slot.expected} times "
                "before, so its reduction may be in flight; leave out --overlap-grad-reduce for this model"
            )
        if slot.added == slot.expected:
            slot.bucket.missing -= 1
            self._start_complete()

    def _start_complete(self) -> None:
        """Start buckets in their order, equal on all ranks, up to the first incomplete one."""
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
    """Stages 2 and 3: reduce a bucket as soon as a microbatch's gradients are complete, as `uses` counts them. One
    bucket is in flight at a time."""

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
        """Reduce a microbatch's gradients.

        A bucket with fewer gradients than expected is reduced with the next microbatch, or at the end of the step;
        one with more is reduced twice.
        """
        if self._travelling is not None:  # one bucket in flight bounds the memory of whole gradients
            self._travelling.finish_reduce()
        bucket.start_reduce()
        self._travelling = bucket
        if not self.overlap:
            bucket.finish_reduce()

    def start(self) -> None:
        super().start()
        for bucket in self.buckets:
            # Only what came after the bucket's last reduction: one that is complete has been sent already.
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
    """Stages 0 to 2: parameters stay whole. With overlap, the all-gather of updated ones is in flight during the next
    forward, and each module waits for its own."""

    def __init__(self, module: nn.Module, buckets: Sequence[Bucket], *, overlap: bool):
        self._buckets, self._overlap = buckets, overlap
        for owner in module.modules() if overlap else ():
            slots = [slot_of(p) for p in owner.parameters(recurse=False)]
            if own := {slot.bucket for slot in slots if slot is not None}:
                owner.register_forward_pre_hook(_waiting_for(own))

    def begin_step(self) -> None:
        """No state of a failed step is in the way."""

    def begin_microbatch(self, *, backward: bool) -> None:
        """Parameters stay resident."""

    def before_forward(self) -> None:
        for bucket in self._buckets:
            if bucket.buffer.is_tied:  # the output layer uses the table but has no hook for it
                bucket.finish_gather()

    def passed(self, bucket: Bucket) -> None:
        """The parameters of the bucket stay resident."""

    def updated(self) -> None:
        """Gather the shards that the other ranks have updated; with overlap, start in the order of the next forward."""
        self.finish()
        # Buckets are in the order of a backward, the reverse of a forward.
        for bucket in reversed(self._buckets):
            bucket.start_gather()
        if not self._overlap:
            self.finish()

    def finish(self) -> None:
        for bucket in self._buckets:
            bucket.finish_gather()


def _waiting_for(buckets: Collection[Bucket]) -> Callable[..., None]:
    """A pre-hook that waits for a module's parameters."""

    def wait(*_: Any) -> None:
        for bucket in buckets:
            bucket.finish_gather()

    wait.may_be_left_out = True  # a layer that does not call the module uses its parameters, and any use waits
    return wait
