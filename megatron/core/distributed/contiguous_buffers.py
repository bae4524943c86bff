"""Contiguous buffers of parameters and gradients, and this rank's shards of them."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from megatron.core.distributed.buffer_plan import BufferPlan, Slot, overlaps
from megatron.core.distributed.data_parallel_config import DataParallelConfig
from megatron.core.offload.offload_tiers import Tier
from megatron.core.offload.stored_tensor import Stored, start_writing
from megatron.core.ops.main_grad_interface import set_slot
from megatron.core.parallel.mesh import GradAxes
from megatron.core.storage.resize_storage import resize

ACROSS_STAGES = "embd"  # the one axis whose ranks finish their backward at different times


class MemoryBuffer:
    """`numel` zeros of one dtype on one device."""

    def __init__(self, numel: int, dtype: torch.dtype, device: torch.device | str = "cpu"):
        self.numel, self.dtype = numel, dtype
        self.data = torch.zeros(numel, dtype=dtype, device=device)

    def zero(self) -> None:
        self.data.zero_()

    def get(self, shape: tuple[int, ...], start: int) -> Tensor:
        """A view of shape `shape` that begins at element `start`."""
        return _view(self.data, shape, start)


class Shard:
    """Runs of elements of a buffer that one rank keeps, each as a flat tensor of `dtype`. With a tier, the tensors may
    be files. A rank may keep no run at all: Muon's momentum on a data-parallel rank whose shard has no matrix."""

    def __init__(self, held: list[tuple[int, int]], tensors: list[Stored], dtype: torch.dtype):
        self.held = held
        self.tensors = tensors
        self.dtype = dtype

    def at(self, start: int, stop: int) -> Stored:
        """Elements start .. stop of the buffer, which must lie within one run."""
        for (first, last), tensor in zip(self.held, self.tensors):
            if first <= start and stop <= last:
                return tensor[start - first : stop - first]
        raise AssertionError(f"elements {start}..{stop} of a shard that holds {self.held}")

    def values(self, slot: Slot) -> Stored:
        """This shard's part of a parameter, flat; empty if it holds none."""
        first, last = self.elements(slot)
        if first == last:
            return torch.empty(0, dtype=self.dtype)
        return self.at(slot.start + first, slot.start + last)

    def elements(self, slot: Slot) -> tuple[int, int]:
        """The range (start, stop) of a parameter's elements, in row-major order, that this shard holds."""
        mine = overlaps(self.held, slot.start, slot.stop)
        return (mine[0][0] - slot.start, mine[0][1] - slot.start) if mine else (0, 0)

    def within(self, held: list[tuple[int, int]]) -> "Shard":
        """The shard restricted to these runs, in the same memory."""
        return self if held == self.held else Shard(held, [self.at(*run) for run in held], self.dtype)


class Transient:
    """A flat tensor whose memory is allocated and released while views of it stay: parameters or gradients of ZeRO 2
    and 3, and gradients that have no other rank to meet.

    It begins open, since torch makes views of allocated memory only. `poison`: the memory stays, and release fills it
    with NaN, so that a use after release shows.
    """

    def __init__(self, numel: int, dtype: torch.dtype, device: torch.device | str = "cpu", *, poison: bool = False):
        self.data = torch.empty(numel, dtype=dtype, device=device)
        self.is_open, self.poison = True, poison
        self._bytes = self.data.untyped_storage().nbytes()

    def open(self) -> Tensor:
        """The tensor, with uninitialized memory."""
        if not self.is_open and not self.poison:
            resize(self.data.untyped_storage(), self._bytes)
        self.is_open = True
        return self.data

    def release(self) -> None:
        self.is_open = False
        if self.poison:
            self.data.fill_(float("nan"))
        else:
            resize(self.data.untyped_storage(), 0)


class ParamAndGradBuffer:
    """The parameters of one plan in one buffer, and their gradients in a second buffer of the same layout.

    Each parameter becomes a view of the first buffer, its `main_grad` a view of the second. For half-precision
    parameters, gradients accumulate in float32, or in `grad_dtype` with float32 sums of this rank's shard. By ZeRO
    stage:

        stage   params     grads      owned_params      sums (the reduced gradients)
        0       whole      whole      all of params     all of grads
        1       whole      whole      shard of params   shard of grads
        2       whole      transient  shard of params   memory of its own
        3       transient  transient  memory of its own memory of its own

    A transient buffer is one `Transient` per bucket: `params_of`, `grads_of`. On a CPU, whole gradients that no other
    rank shares are transient too (`grads_come_late`): resident from the first gradient of their bucket until the next
    step begins. Their memory is that of activations in the forward, which the backward frees as it needs it.

    axes: the ranks that sum gradients; each rank of `axes.shard` owns its shard of every bucket. With an `axes.outer`
    (stage 3) a rank holds a shard of parameters and gradients (`held_params`, `held_sums`) and updates a part of it, the
    part that it owns. Otherwise a rank owns all that it holds. tier: storage of the held parameters of
    stage 3; None: the device's memory.
    """

    def __init__(
        self,
        plan: BufferPlan,
        parameters: Mapping[str, nn.Parameter],
        axes: GradAxes,
        config: DataParallelConfig,
        tier: Tier | None = None,
    ):
        self.plan, self.axes = plan, axes
        self.config, self.zero = config, config.zero
        self.stage, self.poison = config.stage, config.poison_released_buffers
        self.parameters = {slot.name: parameters[slot.name] for slot in plan.slots}
        first = next(iter(self.parameters.values()))
        self.is_tied = ACROSS_STAGES in first.placement.partial_grad  # a table shared by the first and the last stage
        self.dtype, self.master_dtype = first.dtype, torch.promote_types(first.dtype, torch.float32)
        self.grad_dtype = torch.bfloat16 if config.main_grads_dtype == "bf16" else self.master_dtype
        self.device = first.device
        self.held = plan.owned(axes.shard.rank, axes.shard.size)
        self.owned = plan.owned(axes.shard.rank * axes.outer.size + axes.outer.rank)
        self.params = None if self.zero.passes_params else MemoryBuffer(plan.numel, self.dtype, self.device)
        self.grads_come_late = grads_come_late(axes, config) and self.device.type == "cpu"
        self.keeps_grads = False  # those too, from step to step
        self.buckets: list[Any] = []  # set by `Bucket`
        in_buckets = self.zero.passes_grads or self.grads_come_late
        self.grads = None if in_buckets else MemoryBuffer(plan.numel, self.grad_dtype, self.device)
        self.params_of: tuple[Transient, ...] = ()
        self.grads_of: tuple[Transient, ...] = ()
        self.held_params = self._shard(self.params, self.dtype, tier)
        self.owned_params = self.held_params.within(self.owned)
        self._take_in_parameters()
        self.held_sums = self._memory_of_sums()
        self._owned_sums = self.held_sums.within(self.owned) if axes.outer.size > 1 else self.held_sums

    @property
    def sums(self) -> Shard:
        """The reduced gradients that this rank owns. Those that come late are resident until the next step begins."""
        self.open_grads()
        return self._owned_sums

    def open_grads(self) -> None:
        """Allocate gradients that come late, and set zeros where none has come."""
        for bucket in self.buckets if self.grads_come_late else ():
            bucket.complete()

    @property
    def is_half_precision(self) -> bool:
        """Whether the parameters are rounded copies of fp32 masters."""
        return self.dtype != self.master_dtype

    def kept(self, slot: Slot) -> tuple[int, int]:
        """The range (start, stop) of a parameter's elements, in row-major order, whose optimizer state this rank
        owns."""
        return self.owned_params.elements(slot)

    def _memory_of_sums(self) -> Shard:
        if self.config.fixed_order_grad_reduce:  # every rank sums all gradients
            return Shard([(0, self.plan.numel)], [self.grads.data], self.grad_dtype)
        if self.grad_dtype != self.master_dtype:  # wider than the gradients
            return self._shard(None, self.master_dtype)
        if self.grads_come_late:
            runs = [(bucket.start, bucket.stop) for bucket in self.plan.buckets]
            return Shard(runs, [grads.data for grads in self.grads_of], self.grad_dtype)
        return self._shard(self.grads, self.master_dtype)

    def _shard(self, whole: MemoryBuffer | None, dtype: torch.dtype, tier: Tier | None = None) -> Shard:
        """This rank's runs of a whole buffer, as views; zeros if there is no whole buffer."""
        if whole is not None:
            return Shard(self.held, [whole.data[start:stop] for start, stop in self.held], dtype)
        make = partial(torch.zeros, device=self.device) if tier is None else tier.zeros
        return Shard(self.held, [make(stop - start, dtype=dtype) for start, stop in self.held], dtype)

    def _take_in_parameters(self) -> None:
        """Move each parameter and its `main_grad` into the buffers; the memory that the parameter came with is
        released.

        Stage 3 has one bucket resident at a time, so that a model that fits only in shards fits while it is built.
        """
        places = {place.name: place for place in self.plan.slots}
        for bucket in self.plan.buckets:
            span, make = slice(bucket.start, bucket.stop), partial(Transient, bucket.stop - bucket.start)
            params = make(self.dtype, self.device, poison=self.poison) if self.params is None else None
            grads = make(self.grad_dtype, self.device, poison=self.poison) if self.grads is None else None
            if params is not None:
                params.data.zero_()  # the shards include the gaps of alignment
            all_values = self.params.data[span] if params is None else params.data
            all_grads = self.grads.data[span] if grads is None else grads.data
            for name in bucket.names:
                parameter, slot = self.parameters[name], self.parameters[name].slot
                slot.start, slot.stop = places[name].start - bucket.start, places[name].stop - bucket.start
                values = _view(all_values, parameter.shape, slot.start)
                values.copy_(parameter.data)
                parameter.data = values
                # `.data` has a version counter of its own; a plain view shares the buffer's.
                parameter.main_grad = _view(all_grads, parameter.shape, slot.start).data
                set_slot(parameter.main_grad, slot)
            if params is not None:
                self._keep_held(bucket.start, params)
                self.params_of += (params,)
            if grads is not None:
                if not self.grads_come_late:  # views of their sums are made while they are resident
                    grads.release()
                self.grads_of += (grads,)

    def _keep_held(self, first: int, params: Transient) -> None:
        """Copy this rank's shard out of a resident bucket, which begins at element `first`, and release the bucket."""
        for start, stop in overlaps(self.held, first, first + params.data.numel()):
            mine = params.data[start - first : stop - first].clone()  # a storage that numpy has seen cannot be released
            start_writing(self.held_params.at(start, stop), mine).wait()
        params.release()


def grads_come_late(axes: GradAxes, config: DataParallelConfig) -> bool:
    """Whether gradients are whole and need not lie in one piece, since no other rank adds to them."""
    return axes.reduce.size == 1 and not (config.zero.passes_grads or config.fixed_order_grad_reduce)


def _view(flat: Tensor, shape: tuple[int, ...], start: int) -> Tensor:
    stop = start + torch.Size(shape).numel()
    assert stop <= flat.numel(), f"elements {start}..{stop} of {flat.numel()}"
    return flat[start:stop].view(shape)
