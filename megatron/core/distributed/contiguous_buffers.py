"""Contiguous buffers of parameters and gradients, and this rank's shards of them."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from megatron.core.distributed.buffer_plan import BufferPlan, ParamRange, overlaps
from megatron.core.distributed.data_parallel_config import DataParallelConfig
from megatron.core.distributed.param_grad_state import place_in_bucket
from megatron.core.offload.host_and_file_stores import OffloadAllocator
from megatron.core.offload.tensor_in_memory_or_file import Stored, start_writing
from megatron.core.ops.main_grad_interface import set_grad_sink
from megatron.core.parallel.mesh import GradAxes
from megatron.core.storage.resize_storage import resize_and_notify

ACROSS_STAGES = "embd"  # the one axis whose ranks finish their backward at different times


class MemoryBuffer:
    """`numel` zeros of one dtype on one device."""

    def __init__(self, numel: int, dtype: torch.dtype, device: torch.device | str = "cpu"):
        self.numel = numel
        self.dtype = dtype
        self.data = torch.zeros(numel, dtype=dtype, device=device)  # [numel]

    def zero(self) -> None:
        self.data.zero_()

    def get(self, shape: tuple[int, ...], start: int) -> Tensor:
        """Return a view of shape `shape` that begins at element `start` of `data` [numel]."""
        return _view(self.data, shape, start)


class Shard:
    """The part of a buffer that one rank stores: `runs` of elements (start, stop), each as a flat tensor of `dtype`.

    With a tier, the tensors may be files. A rank may store no run at all: Muon's momentum on a data-parallel rank whose
    shard has no matrix.
    """

    def __init__(self, runs: list[tuple[int, int]], tensors: list[Stored], dtype: torch.dtype):
        self.runs = runs
        self.tensors = tensors
        self.dtype = dtype

    def at(self, start: int, stop: int) -> Stored:
        """Return elements start .. stop of the buffer, flat [stop - start]. They must be within one run."""
        for (first, last), tensor in zip(self.runs, self.tensors):
            if first <= start and stop <= last:
                return tensor[start - first : stop - first]
        raise AssertionError(f"elements {start}..{stop} are outside a shard that contains {self.runs}")

    def values(self, param_range: ParamRange) -> Stored:
        """Return this shard's part of a parameter, flat [elements]; [0] if the shard has none."""
        first, last = self.elements(param_range)
        if first == last:
            return torch.empty(0, dtype=self.dtype)
        return self.at(param_range.start + first, param_range.start + last)

    def elements(self, param_range: ParamRange) -> tuple[int, int]:
        """Return the range (start, stop) of a parameter's elements, in row-major order, that this shard stores."""
        shared = overlaps(self.runs, param_range.start, param_range.stop)
        if not shared:
            return (0, 0)
        start, stop = shared[0]  # a shard has at most one range of a parameter
        return (start - param_range.start, stop - param_range.start)

    def within(self, runs: list[tuple[int, int]]) -> "Shard":
        """Return the shard restricted to these runs, flat tensors [stop - start] in the same memory."""
        if runs == self.runs:
            return self
        return Shard(runs, [self.at(*run) for run in runs], self.dtype)


class ReleasableBuffer:
    """A flat tensor [numel] whose memory is released and allocated again while views of it stay valid objects.

    It holds parameters or gradients of ZeRO 2 and 3, and lazily allocated gradients. It begins open, since torch makes
    views of allocated memory only. `poison`: the memory stays, and release fills it with NaN, integers with their
    largest, so that a use after release shows.
    """

    def __init__(self, numel: int, dtype: torch.dtype, device: torch.device | str = "cpu", *, poison: bool = False):
        self.data = torch.empty(numel, dtype=dtype, device=device)  # [numel]
        self.is_open = True
        self.poison = poison
        self._bytes = self.data.untyped_storage().nbytes()

    def open(self) -> Tensor:
        """Allocate the memory if it is released, and return the flat tensor [numel].

        Newly allocated memory is uninitialized.
        """
        if not self.is_open and not self.poison:
            resize_and_notify(self.data.untyped_storage(), self._bytes)
        self.is_open = True
        return self.data

    def release(self) -> None:
        """Free the memory; with `poison`, fill it with NaN instead."""
        self.is_open = False
        if self.poison:
            self.data.fill_(float("nan") if self.data.is_floating_point() else torch.iinfo(self.data.dtype).max)
        else:
            resize_and_notify(self.data.untyped_storage(), 0)


class ParamBuffer:
    """The parameters of one plan in one buffer. By itself it holds the frozen parameters of ZeRO stage 3.

    Each parameter becomes a view of the buffer. `params` is the whole buffer. In stage 3 it is None: each rank keeps
    `param_shard`, its shard of every bucket, and `params_of` has one `ReleasableBuffer` for each bucket, which is
    resident while the parameters are gathered.

    axes: each rank of `axes.shard` has a shard of every bucket. With `axes.outer` (stage 3) a rank updates a part of its
    shard: the elements `owned_runs`, whose parameters are `owned_params`; else these are its whole shard.
    offload_store: storage of `param_shard` in stage 3; None: the device's memory.
    """

    def __init__(
        self,
        plan: BufferPlan,
        parameters: Mapping[str, nn.Parameter],
        axes: GradAxes,
        config: DataParallelConfig,
        offload_store: OffloadAllocator | None = None,
    ):
        self.plan = plan
        self.axes = axes
        self.config = config
        self.zero = config.zero
        self.stage = config.stage
        self.poison = config.poison_released_buffers
        self.parameters = {
            param_range.name: parameters[param_range.name] for param_range in plan.param_ranges
        }  # in the order of the buffer
        first = next(iter(self.parameters.values()))
        self.device = first.device
        self.dtype = first.dtype

        # elements of this rank: its shard, and the part of the shard that it updates
        self.shard_runs = plan.shard_runs(axes.shard.rank, axes.shard.size)
        self.owned_runs = plan.shard_runs(axes.shard.rank * axes.outer.size + axes.outer.rank)

        # the parameters move into the buffer; in stage 3 only into `param_shard`
        self.params: MemoryBuffer | None = None
        if not self.zero.shards_params:
            self.params = MemoryBuffer(plan.numel, self.dtype, self.device)
        self.params_of: tuple[ReleasableBuffer, ...] = ()
        self.buckets: list[Any] = []  # each `ParamBucket` adds itself
        self.param_shard = self._make_shard(self.params, self.dtype, offload_store)
        self.owned_params = self.param_shard.within(self.owned_runs)
        self._adopt_parameters()

    def _make_shard(
        self, buffer: MemoryBuffer | None, dtype: torch.dtype, offload_store: OffloadAllocator | None = None
    ) -> Shard:
        """Return this rank's shard: views of a whole buffer, or zeros if there is no whole buffer."""
        if buffer is not None:
            return Shard(self.shard_runs, [buffer.data[start:stop] for start, stop in self.shard_runs], dtype)
        zeros = partial(torch.zeros, device=self.device) if offload_store is None else offload_store.zeros
        return Shard(self.shard_runs, [zeros(stop - start, dtype=dtype) for start, stop in self.shard_runs], dtype)

    def _adopt_parameters(self) -> None:
        """Move each parameter into the buffer; its old memory is released.

        Stage 3 has one bucket resident at a time, so that a model that fits only in shards fits while it is built.
        """
        ranges = {param_range.name: param_range for param_range in self.plan.param_ranges}
        for bucket in self.plan.buckets:
            # the bucket's memory: a part of the whole buffer, or a releasable buffer of its own
            released: ReleasableBuffer | None = None
            if self.params is None:
                released = ReleasableBuffer(bucket.stop - bucket.start, self.dtype, self.device, poison=self.poison)
                released.data.zero_()  # the shards include the gaps of alignment
            all_values = self.params.data[bucket.start : bucket.stop] if released is None else released.data  # [numel]

            # each parameter becomes a view of it
            for name in bucket.names:
                parameter = self.parameters[name]
                place = place_in_bucket(parameter)
                place.start = ranges[name].start - bucket.start
                place.stop = ranges[name].stop - bucket.start
                values = _view(all_values, parameter.shape, place.start)
                values.copy_(parameter.data)
                parameter.data = values

            # stage 3: this rank's shard is copied out, the rest released
            if released is not None:
                self._keep_shard(bucket.start, released)
                self.params_of += (released,)

    def _keep_shard(self, bucket_start: int, params: ReleasableBuffer) -> None:
        """Copy this rank's shard out of a resident bucket, and release the bucket.

        The bucket begins at element `bucket_start`.
        """
        for start, stop in overlaps(self.shard_runs, bucket_start, bucket_start + params.data.numel()):
            # cloned, since a storage that numpy has seen cannot be released
            own_values = params.data[start - bucket_start : stop - bucket_start].clone()
            start_writing(self.param_shard.at(start, stop), own_values).wait()
        params.release()


class ParamAndGradBuffer(ParamBuffer):
    """Trained parameters in one buffer, and their gradients in a second buffer of the same layout.

    The `main_grad` of a parameter is a view of the second buffer, of its shape. For half-precision parameters, gradients
    accumulate in float32, or in `grad_dtype` with float32 sums of this rank's shard. By ZeRO stage:

        stage   params      grads       owned_params      sums (the reduced gradients)
        0       whole       whole       all of params     all of grads
        1       whole       whole       shard of params   shard of grads
        2       whole       releasable  shard of params   memory of its own
        3       releasable  releasable  memory of its own memory of its own

    A releasable buffer is one `ReleasableBuffer` per bucket: `params_of`, `grads_of`. On a CPU, whole gradients that no
    other rank shares are releasable too (`grads_need_no_buffer`): resident from the first gradient of their bucket until the
    next step begins. They then use the memory of the activations, which the backward frees as it goes.

    axes: the ranks that sum gradients; `grad_shard` is laid out as `param_shard`.
    """

    def __init__(
        self,
        plan: BufferPlan,
        parameters: Mapping[str, nn.Parameter],
        axes: GradAxes,
        config: DataParallelConfig,
        offload_store: OffloadAllocator | None = None,
    ):
        super().__init__(plan, parameters, axes, config, offload_store)
        first = next(iter(self.parameters.values()))
        self.is_tied = ACROSS_STAGES in first.placement.partial_grad  # an embedding that first and last stage share

        # dtypes: of the optimizer's masters, of the gradients
        self.master_dtype = torch.promote_types(self.dtype, torch.float32)
        self.grad_dtype = torch.bfloat16 if config.main_grads_dtype == "bf16" else self.master_dtype

        # gradients: a whole buffer; None: one releasable buffer per bucket instead
        self.grads_need_no_buffer = grads_need_no_buffer(axes, config) and self.device.type == "cpu"
        self.keeps_grads = False  # lazily allocated gradients stay allocated from step to step
        self.grads: MemoryBuffer | None = None
        if not (self.zero.shards_grads or self.grads_need_no_buffer):
            self.grads = MemoryBuffer(plan.numel, self.grad_dtype, self.device)
        self.grads_of: tuple[ReleasableBuffer, ...] = ()
        self._make_main_grads()

        # the reduced gradients
        self.grad_shard = self._make_grad_shard()
        self._owned_sums = self.grad_shard.within(self.owned_runs) if axes.outer.size > 1 else self.grad_shard

    @property
    def sums(self) -> Shard:
        """The reduced gradients that this rank owns, flat, in master_dtype.

        Lazily allocated ones are resident until the next step begins.
        """
        self.open_grads()
        return self._owned_sums

    def open_grads(self) -> None:
        """Allocate lazily allocated gradients, and set zeros where this step has added none."""
        if self.grads_need_no_buffer:
            for bucket in self.buckets:
                bucket.complete()

    @property
    def is_half_precision(self) -> bool:
        """Whether the parameters are rounded copies of fp32 masters."""
        return self.dtype != self.master_dtype

    def owned_range(self, param_range: ParamRange) -> tuple[int, int]:
        """Return the range (start, stop) of a parameter's elements whose optimizer state this rank owns.

        Elements are counted in row-major order.
        """
        return self.owned_params.elements(param_range)

    def _make_main_grads(self) -> None:
        """Make each parameter's `main_grad` a view of the gradients. In stages 2 and 3 one bucket is resident at a time."""
        for bucket in self.plan.buckets:
            grads: ReleasableBuffer | None = None
            if self.grads is None:
                grads = ReleasableBuffer(bucket.stop - bucket.start, self.grad_dtype, self.device, poison=self.poison)
            all_grads = self.grads.data[bucket.start : bucket.stop] if grads is None else grads.data  # [numel]
            for name in bucket.names:
                parameter = self.parameters[name]
                sink = parameter.grad_sink
                # `.data` has a version counter of its own; a plain view shares the buffer's.
                parameter.main_grad = _view(all_grads, parameter.shape, sink.start).data
                set_grad_sink(parameter.main_grad, sink)
            if grads is not None:
                if not self.grads_need_no_buffer:  # `_make_grad_shard` makes views of lazy ones, which must be resident
                    grads.release()
                self.grads_of += (grads,)

    def _make_grad_shard(self) -> Shard:
        """Return where the reduced gradients of this rank's shard are: views of `grads`, or memory of their own."""
        if self.config.fixed_order_grad_reduce:  # every rank sums all gradients
            return Shard([(0, self.plan.numel)], [self.grads.data], self.grad_dtype)
        if self.grad_dtype != self.master_dtype:  # the sums are wider than the gradients
            return self._make_shard(None, self.master_dtype)
        if self.grads_need_no_buffer:
            bucket_runs = [(bucket.start, bucket.stop) for bucket in self.plan.buckets]
            return Shard(bucket_runs, [grads.data for grads in self.grads_of], self.grad_dtype)
        return self._make_shard(self.grads, self.master_dtype)


def grads_need_no_buffer(axes: GradAxes, config: DataParallelConfig) -> bool:
    """Return whether gradients are whole and need no contiguous memory, since no other rank adds to them."""
    return axes.reduce.size == 1 and not (config.zero.shards_grads or config.fixed_order_grad_reduce)


def _view(flat: Tensor, shape: tuple[int, ...], start: int) -> Tensor:
    """Return elements start .. of a flat tensor [numel] as a view of `shape`."""
    stop = start + torch.Size(shape).numel()
    assert stop <= flat.numel(), f"elements {start}..{stop} of {flat.numel()}"
    return flat[start:stop].view(shape)
