"""The ZeRO stages as two strategies per chunk: when gradients are reduced, and when parameters are gathered.

    stage         gradients                                parameters
    0, 1          ReduceOnce, at the end of a step         ParamGather, after the update
    2             ReduceEachMicrobatch                     ParamGather
    3             ReduceEachMicrobatch                     ParamFetcher (`zero3_param_fetcher.py`), around each use
    0, 1, fixed   ReduceInMicrobatchOrder (`reduce_in_microbatch_order.py`)    ParamGather

A step calls them in this order:

    begin_step(m)                              before the first microbatch
      begin_microbatch(i, backward=...)        before each forward and backward
        open(sink), add(sink)                  by layers, around each gradient; defer(sink): the gradient comes later
    start()                                    after the last backward
    finish()                                   the sums of this rank's shard are complete
    updated()                                  after the optimizer, of the ParamGather

Inside a bucket (`bucket_reduce_and_gather.py`) the stages differ by its memory: with or without shards, permanent or releasable.
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

from torch import nn

from megatron.core.distributed.bucket_reduce_and_gather import Bucket
from megatron.core.distributed.grad_count import GradCounter
from megatron.core.distributed.param_grad_state import GradReduceInterface, ParamGradSink, param_grad_sink_of
from megatron.core.distributed.zero_collective_order_check import CollectiveOrderCheck
from megatron.core.ops.weight_grad_store import WeightGradStore


class GradReduce(GradReduceInterface):
    """Base of the gradient strategies.

    reduction_started: no backward of the step follows. is_complete: the gradients are reduced.
    """

    sums_tied_embedding = False  # whether the strategy also sums an embedding that first and last pipeline stage share

    def __init__(self, buckets: Sequence[Bucket], *, overlap: bool):
        self.buckets = buckets
        self.overlap = overlap
        self.sinks = [sink for bucket in buckets for sink in bucket.sinks]
        for sink in self.sinks:
            sink.reduce = self
        self.reduction_started = False
        self.is_complete = True
        self.learned = False  # whether a step has shown how many gradients each parameter gets
        self._num_microbatches: int | None = None  # of this step

    @property
    def has_gradients(self) -> bool:
        """Whether the step has any yet; validation has none."""
        return any(sink.added for sink in self.sinks)

    def begin_step(self, num_microbatches: int | None) -> None:
        """Forget the last step, except the number of gradients that each parameter got.

        With an equal number of microbatches, a parameter gets at most that many again. After an error, or with another
        number, the counts are learned anew.
        """
        keeps_counts = self.is_complete and num_microbatches == self._num_microbatches
        self._num_microbatches = num_microbatches
        self.reduction_started = False
        self.is_complete = False
        for sink in self.sinks:
            sink.expected = max(sink.expected, sink.added) if keeps_counts else 0
            sink.added = 0
        self.learned = any(sink.expected for sink in self.sinks)
        for bucket in self.buckets:
            bucket.begin_step()
            # Before the counts are learned, every parameter is expected, and no bucket starts early.
            bucket.missing = sum(sink.expected > 0 or not self.learned for sink in bucket.sinks)

    def begin_microbatch(self, microbatch: int, *, backward: bool) -> None:
        """Prepare a forward or backward of the microbatch."""

    def open(self, sink: ParamGradSink, *, overwrites: bool = False) -> bool:
        """Prepare `main_grad` for a gradient. Returns True if the caller must overwrite it (`Bucket.open_grad`)."""
        return sink.bucket.open_grad(sink, overwrites=overwrites)

    def defer(self, sink: ParamGradSink) -> None:
        """Note that the backward no longer needs the parameter's values, and that its gradient comes later."""
        self.open(sink)

    def add(self, sink: ParamGradSink) -> None:
        """Count a gradient. Raises RuntimeError after the reduction began.

        A step without gradients, such as validation, may continue.
        """
        # Validation begins and ends a step without gradients; training may then add to it.
        if self.reduction_started and self.has_gradients:
            raise RuntimeError(
                f"the gradient of {sink.name} was added after the step's gradients had been reduced over the ranks; "
                "call zero_grad_buffer() of each model chunk before the first forward of a step, and run all "
                "microbatches of the step in one call of get_forward_backward_func()"
            )
        if self.reduction_started:
            self.reduction_started = False
            self.is_complete = False
        sink.added += 1

    def start(self) -> None:
        """Start every reduction that is not in flight."""
        self.reduction_started = True

    def finish(self) -> None:
        """Wait until this rank's shard of each gradient is the sum over all samples of the step."""


class ReduceOnce(GradReduce):
    """Stages 0 and 1: reduce at the end of a step; with overlap, each bucket as soon as its gradients are complete."""

    def add(self, sink: ParamGradSink) -> None:
        super().add(sink)
        if not (self.overlap and self.learned):
            return
        if sink.added > sink.expected:
            raise RuntimeError(
                f"the gradient of {sink.name} was written {sink.added} times in this step, but at most "
                f"{sink.expected} times before, so its reduction may already have begun; leave out "
                "--overlap-grad-reduce for this model"
            )
        if sink.added < sink.expected:
            return
        sink.bucket.missing -= 1
        # Start buckets in their order, equal on all ranks, up to the first incomplete one.
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
    """Stages 2 and 3: reduce a bucket as soon as a microbatch's gradients are complete, as `counter` counts them.

    One bucket is in flight at a time. A bucket with fewer gradients than expected is reduced with the next microbatch,
    or at the end of the step; one with more is reduced twice.
    """

    def __init__(
        self,
        buckets: Sequence[Bucket],
        params: "ParamGather",
        counter: GradCounter,
        orders: Iterable[CollectiveOrderCheck],
        weight_grads: WeightGradStore,
        *,
        overlap: bool,
    ):
        super().__init__(buckets, overlap=overlap)
        self._param_gather = params
        self._counter = counter
        self._orders = list(orders)
        self._weight_grads = weight_grads
        self._in_flight: Bucket | None = None

    def begin_step(self, num_microbatches: int | None) -> None:
        self._in_flight = None
        self._counter.forget()
        for order in self._orders:
            order.forget()
        super().begin_step(num_microbatches)

    def begin_microbatch(self, microbatch: int, *, backward: bool) -> None:
        self._counter.begin(microbatch, backward=backward, defers_wgrads=self._weight_grads.is_collecting)

    def defer(self, sink: ParamGradSink) -> None:
        if self._counter.param_done(sink.bucket):
            self._param_gather.bucket_done(sink.bucket)

    def add(self, sink: ParamGradSink) -> None:
        super().add(sink)
        sink.bucket.is_written = True
        self.defer(sink)  # the backward is done with the parameter, as if its gradient were deferred
        if not self._counter.grad_done(sink.bucket):
            return
        # The microbatch's gradients of the bucket are complete.
        if self._in_flight is not None:  # one bucket in flight bounds the memory of whole gradients
            self._in_flight.finish_reduce()
        sink.bucket.start_reduce()
        self._in_flight = sink.bucket
        if not self.overlap:
            sink.bucket.finish_reduce()

    def start(self) -> None:
        super().start()
        for bucket in self.buckets:
            # Only gradients that were added after the bucket's last reduction; complete ones have been sent already.
            if bucket.is_written:
                bucket.start_reduce()
        for order in self._orders:
            order.end()

    def finish(self) -> None:
        self._counter.end()
        for bucket in self.buckets:
            bucket.finish_reduce()
            bucket.sum_over_replicas()


class ParamGather:
    """Stages 0 to 2: parameters stay whole.

    With overlap, the all-gather of updated ones is in flight during the next forward, and each module waits
    for its own.
    """

    def __init__(self, module: nn.Module, buckets: Sequence[Bucket], *, overlap: bool):
        self._buckets = buckets
        self._overlap = overlap
        if not overlap:
            return
        for owner in module.modules():
            sinks = [param_grad_sink_of(p) for p in owner.parameters(recurse=False)]
            own_buckets = {sink.bucket for sink in sinks if sink is not None}
            if own_buckets:
                owner.register_forward_pre_hook(_wait_for(own_buckets))

    def begin_step(self) -> None:
        """Prepare a step, also after one that ended in an error. Here nothing is left of it."""

    def begin_microbatch(self, *, backward: bool) -> None:
        """Prepare the forward or backward of a microbatch. Here parameters stay resident."""

    def before_forward(self) -> None:
        """Prepare a forward of the chunk."""
        for bucket in self._buckets:
            if bucket.buffer.is_tied:  # the output layer uses the embedding's weight but has no hook for it
                bucket.finish_gather()

    def bucket_done(self, bucket: Bucket) -> None:
        """Note that the backward no longer needs the values of this bucket. Here they stay resident."""

    def updated(self) -> None:
        """Gather the shards that the other ranks have updated; with overlap, start in the order of the next forward."""
        self.finish()
        # Buckets are in the order of a backward, the reverse of a forward.
        for bucket in reversed(self._buckets):
            bucket.start_gather()
        if not self._overlap:
            self.finish()

    def finish(self) -> None:
        """Wait until all parameters are resident."""
        for bucket in self._buckets:
            bucket.finish_gather()


def _wait_for(buckets: Collection[Bucket]) -> Callable[..., None]:
    """Return a pre-hook that waits for a module's parameters."""

    def wait(*_: Any) -> None:
        for bucket in buckets:
            bucket.finish_gather()

    wait.may_be_left_out = True  # a layer that does not call the module uses its parameters, and any use waits
    return wait
