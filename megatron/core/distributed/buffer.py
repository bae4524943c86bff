"""Contiguous memory that many tensors are views of."""

from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor, nn

from megatron.core.distributed.data_parallel_config import DataParallelConfig
from megatron.core.distributed.plan import BufferPlan, Slot, overlaps
from megatron.core.mesh import GradAxes
from megatron.core.storage.stored import Stored, start_writing
from megatron.core.tiers.tier import Tier

ACROSS_STAGES = "embd"  # the one axis whose ranks finish their backward at different times


class MemoryBuffer:
    """`numel` zeros of one dtype on one device."""

    def __init__(self, numel: int, dtype: torch.dtype, device: torch.device | str = "cpu"):
        self.numel, self.dtype = numel, dtype
        self.data = torch.zeros(numel, dtype=dtype, device=device)

    def zero(self) -> None:
        self.data.zero_()

    def get(self, shape: tuple[int, ...], start: int) -> Tensor:
        """The elements from `start` on, as a tensor of `shape` that shares their memory."""
        return _view(self.data, shape, start)


class Shard:
    """Some runs of elements of a buffer, each in a flat tensor: what one rank keeps of something laid out like the
    buffer. In a tier of its own it may lie in a file."""

    def __init__(self, held: list[tuple[int, int]], tensors: list[Stored]):
        self.held, self.tensors = held, tensors

    def at(self, start: int, stop: int) -> Stored:
        """Elements start .. stop of the buffer, which must lie within one run."""
        for (first, last), tensor in zip(self.held, self.tensors):
            if first <= start and stop <= last:
                return tensor[start - first : stop - first]
        raise AssertionError(f"elements {start}..{stop} of a shard that holds {self.held}")

    def values(self, slot: Slot) -> Stored:
        """What it has of a parameter, flat; perhaps nothing."""
        first, last = self.elements(slot)
        return self.at(slot.start + first, slot.start + last) if last else self.tensors[0][:0]

    def elements(self, slot: Slot) -> tuple[int, int]:
        """Which elements of a parameter it has, in row-major order."""
        mine = overlaps(self.held, slot.start, slot.stop)
        return (mine[0][0] - slot.start, mine[0][1] - slot.start) if mine else (0, 0)

    def within(self, held: list[tuple[int, int]]) -> "Shard":
        """Some runs of it, in the same memory."""
        return self if held == self.held else Shard(held, [self.at(*run) for run in held])


class Transient:
    """A flat tensor whose memory comes and goes, while views of it stay: parameters and gradients that are whole for a
    while.

    It begins open, since torch makes views of memory that is there only. `poison`: to find what is used while it is
    away, it keeps its memory, and every value is NaN from its release until somebody writes it.
    """

    def __init__(self, numel: int, dtype: torch.dtype, device: torch.device | str = "cpu", *, poison: bool = False):
        self.data = torch.empty(numel, dtype=dtype, device=device)
        self.is_open, self.poison = True, poison
        self._bytes = self.data.untyped_storage().nbytes()

    def open(self) -> Tensor:
        """The tensor with its memory, which is not set to anything."""
        if not self.is_open and not self.poison:
            self.data.untyped_storage().resize_(self._bytes)
        self.is_open = True
        return self.data

    def release(self) -> None:
        self.is_open = False
        if self.poison:
            self.data.fill_(float("nan"))
        else:
            self.data.untyped_storage().resize_(0)


class ParamAndGradBuffer:
    """The parameters of one plan end to end, and their gradients laid out alike.

    Each parameter becomes a view of the first, and its `main_grad` a view of the second. Gradients are kept in float32
    for half-precision parameters, so that many microbatches can be summed; or in `grad_dtype`, and only what a rank
    gets as their sum is float32. What lies where, by ZeRO stage:

        stage   params   grads    owned_params     sums, what a step's gradients become
        0       whole    whole    all of params    all of grads
        1       whole    whole    a part of params a part of grads
        2       whole    passing  a part of params own memory
        3       passing  passing  own memory       own memory

    Passing tensors are `Transient`, one a bucket: `params_of`, `grads_of`. axes: where gradients are summed; each rank
    of `axes.shard` owns its part of every bucket. With an `axes.outer`, in stage 3, a rank holds a shard of parameters
    and gradients (`held_params`, `held_sums`) and owns, that is updates, a part of that. Else a rank owns what it
    holds.
    tier: where the held parameters of stage 3 are kept; with the others when None.
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
        self.is_tied = ACROSS_STAGES in first.placement.partial_grad  # a table that the first and the last stage share
        self.dtype, self.master_dtype = first.dtype, torch.promote_types(first.dtype, torch.float32)
        self.grad_dtype = torch.bfloat16 if config.main_grads_dtype == "bf16" else self.master_dtype
        self.device = first.device
        self.held = plan.owned(axes.shard.rank, axes.shard.size)
        self.owned = plan.owned(axes.shard.rank * axes.outer.size + axes.outer.rank)
        self.params = None if self.zero.passes_params else MemoryBuffer(plan.numel, self.dtype, self.device)
        self.grads = None if self.zero.passes_grads else MemoryBuffer(plan.numel, self.grad_dtype, self.device)
        self.params_of: tuple[Transient, ...] = ()
        self.grads_of: tuple[Transient, ...] = ()
        if config.fixed_order_grad_reduce:  # every rank adds up all of them
            self.held_sums = Shard([(0, plan.numel)], [self.grads.data])
        else:  # sums have memory of their own where they are wider than what is added up
            self.held_sums = self._shard(
                self.grads if self.grad_dtype == self.master_dtype else None, self.master_dtype
            )
        self.held_params = self._shard(self.params, self.dtype, tier)
        self.owned_params = self.held_params.within(self.owned)
        self.sums = self.held_sums.within(self.owned) if axes.outer.size > 1 else self.held_sums
        self._take_in_parameters()

    @property
    def is_half_precision(self) -> bool:
        """Whether the parameters are rounded copies of masters."""
        return self.dtype != self.master_dtype

    def kept(self, slot: Slot) -> tuple[int, int]:
        """Which elements of a parameter, in row-major order, this rank owns."""
        return self.owned_params.elements(slot)

    def _shard(self, whole: MemoryBuffer | None, dtype: torch.dtype, tier: Tier | None = None) -> Shard:
        """What is held of a whole buffer, in its memory; of none, zeros."""
        if whole is not None:
            return Shard(self.held, [whole.data[start:stop] for start, stop in self.held])
        make = partial(torch.zeros, device=self.device) if tier is None else tier.zeros
        return Shard(self.held, [make(stop - start, dtype=dtype) for start, stop in self.held])

    def _take_in_parameters(self) -> None:
        """Make each parameter and its `main_grad` views of where their values lie, which gives up the memory it came
        with.

        What passes is there for one bucket at a time, so that a model which fits in shards only fits while it is built.
        """
        places = {place.name: place for place in self.plan.slots}
        for bucket in self.plan.buckets:
            span, make = slice(bucket.start, bucket.stop), partial(Transient, bucket.stop - bucket.start)
            params = make(self.dtype, self.device, poison=self.poison) if self.params is None else None
            grads = make(self.grad_dtype, self.device, poison=self.poison) if self.grads is None else None
            if params is not None:
                params.data.zero_()  # the gaps too, which ranks keep like the rest
            all_values = self.params.data[span] if params is None else params.data
            all_grads = self.grads.data[span] if grads is None else grads.data
            for name in bucket.names:
                parameter, slot = self.parameters[name], self.parameters[name].slot
                slot.start, slot.stop = places[name].start - bucket.start, places[name].stop - bucket.start
                values = _view(all_values, parameter.shape, slot.start)
                values.copy_(parameter.data)
                parameter.data = values
                # Its `data` counts its own changes, and not those of the whole buffer.
                parameter.main_grad = _view(all_grads, parameter.shape, slot.start).data
                parameter.main_grad.slot = slot
            if params is not None:
                self._keep_held(bucket.start, params)
                self.params_of += (params,)
            if grads is not None:
                grads.release()
                self.grads_of += (grads,)

    def _keep_held(self, first: int, params: Transient) -> None:
        """Of a bucket's parameters, which begin at element `first`, keep what this rank holds."""
        for start, stop in overlaps(self.held, first, first + params.data.numel()):
            mine = params.data[start - first : stop - first].clone()  # memory that numpy has seen stays for good
            start_writing(self.held_params.at(start, stop), mine).wait()
        params.release()


def _view(flat: Tensor, shape: tuple[int, ...], start: int) -> Tensor:
    stop = start + torch.Size(shape).numel()
    assert stop <= flat.numel(), f"elements {start}..{stop} of {flat.numel()}"
    return flat[start:stop].view(shape)
