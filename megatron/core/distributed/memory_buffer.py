"""Contiguous memory that many tensors are views of."""

from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor, nn

from megatron.core.distributed.plan import BufferPlan, Slot, overlaps
from megatron.core.mesh import GradAxes
from megatron.core.storage.stored import Stored, start_writing
from megatron.core.tiers.tier import Tier


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
    """Some runs of elements of a buffer, each in a flat tensor: what one rank keeps of something laid out like the buffer. In a tier
    of its own it may lie in a file."""

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
        mine = overlaps(self.held, slot.start, slot.stop)
        return self.at(*mine[0]) if mine else self.tensors[0][:0]

    def within(self, held: list[tuple[int, int]]) -> "Shard":
        """Some runs of it, in the same memory."""
        return self if held == self.held else Shard(held, [self.at(*run) for run in held])


class Transient:
    """A flat tensor whose memory comes and goes, while views of it stay: parameters and gradients that are whole for a while.

    It begins open, since torch makes views of memory that is there only. `poison`: to find what is used while it is away, it keeps its
    memory, and every value is NaN from its release until somebody writes it.
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

    def get(self, shape: tuple[int, ...], start: int) -> Tensor:
        """As a buffer's."""
        return _view(self.data, shape, start)

    def release(self) -> None:
        self.is_open = False
        if self.poison:
            self.data.fill_(float("nan"))
        else:
            self.data.untyped_storage().resize_(0)


class ParamAndGradBuffer:
    """The parameters of one plan end to end, and their gradients laid out alike.

    Each parameter becomes a view of the first, and its `main_grad` a view of the second. Gradients are kept in float32 for
    half-precision parameters, so that many microbatches can be summed; or in `grad_dtype`, and only what a rank gets as their sum is
    float32. What lies where, by ZeRO stage:

        stage   params   grads    owned_params     sums, what a step's gradients become
        0       whole    whole    all of params    all of grads
        1       whole    whole    a part of params a part of grads
        2       whole    passing  a part of params own memory
        3       passing  passing  own memory       own memory

    Passing tensors are `Transient`, one a bucket: `params_of`, `grads_of`. axes: where gradients are summed; each rank of `axes.shard`
    owns its part of every bucket. With an `axes.outer`, in stage 3, a rank holds a shard of parameters and gradients (`held_params`,
    `held_sums`) and owns, that is updates, a part of that. Else a rank owns what it holds.
    `summed_in_shards`: whether a rank gets the sums that it owns only. poison: for `Transient`.
    tier: where the held parameters of stage 3 are kept; with the others when None.
    """

    def __init__(
        self,
        plan: BufferPlan,
        parameters: Mapping[str, nn.Parameter],
        axes: GradAxes,
        *,
        stage: int = 0,
        summed_in_shards: bool = True,
        poison: bool = False,
        grad_dtype: torch.dtype | None = None,
        tier: Tier | None = None,
    ):
        first = parameters[plan.slots[0].name]
        self.plan, self.axes = plan, axes
        self.stage, self.poison = stage, poison
        self.parameters = {slot.name: parameters[slot.name] for slot in plan.slots}
        self.dtype, self.master_dtype = first.dtype, torch.promote_types(first.dtype, torch.float32)
        self.grad_dtype = grad_dtype or self.master_dtype
        self.device = first.device
        self.held = plan.owned(axes.shard.rank, axes.shard.size)
        self.owned = plan.owned(axes.shard.rank * axes.outer.size + axes.outer.rank)
        self.params = self.grads = None
        self.params_of = self.grads_of = ()
        if stage < 3:
            self.params = MemoryBuffer(plan.numel, self.dtype, self.device)
            self.held_params = self._part_of(self.params.data)
        else:
            self.held_params = self._shard_of_zeros(self.dtype, tier)
        if stage < 2:
            self.grads = MemoryBuffer(plan.numel, self.grad_dtype, self.device)
            self.held_sums = (
                self._part_of(self.grads.data)
                if self.grad_dtype == self.master_dtype
                else self._shard_of_zeros(self.master_dtype)
            )
            if not summed_in_shards:
                self.held_sums = Shard([(0, plan.numel)], [self.grads.data])
        else:
            self.held_sums = self._shard_of_zeros(self.master_dtype)
        self.owned_params = self.held_params.within(self.owned)
        self.sums = self.held_sums.within(self.owned) if axes.outer.size > 1 else self.held_sums
        self._take_in_parameters()

    @property
    def is_half_precision(self) -> bool:
        """Whether the parameters are rounded copies of masters."""
        return self.dtype != self.master_dtype

    def kept(self, slot: Slot) -> tuple[int, int]:
        """Which elements of a parameter, in row-major order, this rank owns."""
        return _elements(slot, self.owned)

    def kept_values(self, slot: Slot) -> tuple[int, int]:
        """Which of them it holds the values of."""
        return _elements(slot, self.held)

    def _part_of(self, whole: Tensor) -> Shard:
        return Shard(self.held, [whole[start:stop] for start, stop in self.held])

    def _shard_of_zeros(self, dtype: torch.dtype, tier: Tier | None = None) -> Shard:
        make = partial(torch.zeros, device=self.device) if tier is None else tier.zeros
        return Shard(self.held, [make(b - a, dtype=dtype) for a, b in self.held])

    def _take_in_parameters(self) -> None:
        """Make each parameter and its `main_grad` views of where their values lie, which gives up the memory it came with.

        What passes is there for one bucket at a time, so that a model which fits in shards only fits while it is built.
        """
        starts = {slot.name: slot.start for slot in self.plan.slots}
        for bucket in self.plan.buckets:
            size = bucket.stop - bucket.start
            params = Transient(size, self.dtype, self.device, poison=self.poison) if self.params is None else None
            grads = Transient(size, self.grad_dtype, self.device, poison=self.poison) if self.grads is None else None
            if params is not None:
                params.data.zero_()  # the gaps too, which ranks keep like the rest
            for name in bucket.names:
                parameter, start = self.parameters[name], starts[name]
                values = _place(self.params, params, parameter.shape, start, bucket.start)
                values.copy_(parameter.data)
                parameter.data = values
                grad = _place(self.grads, grads, parameter.shape, start, bucket.start)
                parameter.main_grad = grad.data  # which counts its own changes, and not those of the whole buffer
                parameter.main_grad.released_name = name
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


def _place(
    whole: MemoryBuffer | None, passing: Transient | None, shape: tuple[int, ...], start: int, first: int
) -> Tensor:
    """The elements from `start` of the buffer on, as a view of what is whole, or of what is passing and begins at element `first`."""
    return whole.get(shape, start) if passing is None else passing.get(shape, start - first)


def _elements(slot: Slot, held: list[tuple[int, int]]) -> tuple[int, int]:
    mine = overlaps(held, slot.start, slot.stop)
    return (mine[0][0] - slot.start, mine[0][1] - slot.start) if mine else (0, 0)
