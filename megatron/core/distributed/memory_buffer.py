"""Contiguous memory that many tensors are views of."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from megatron.core.distributed.plan import BufferPlan, Slot, overlaps
from megatron.core.grid import ALONE, Axis


class MemoryBuffer:
    """`numel` zeros of one dtype on one device."""

    def __init__(self, numel: int, dtype: torch.dtype, device: torch.device | str = "cpu"):
        self.numel, self.dtype = numel, dtype
        self.data = torch.zeros(numel, dtype=dtype, device=device)

    def zero(self) -> None:
        self.data.zero_()

    def get(self, shape: tuple[int, ...], start: int) -> Tensor:
        """The elements from `start` on, as a tensor of `shape` that shares their memory."""
        stop = start + torch.Size(shape).numel()
        assert stop <= self.numel, f"elements {start}..{stop} of a buffer of {self.numel}"
        return self.data[start:stop].view(shape)


class Shard:
    """Some runs of elements of a buffer, each in a flat tensor: what one rank keeps of something laid out like the buffer."""

    def __init__(self, held: list[tuple[int, int]], tensors: list[Tensor]):
        self.held, self.tensors = held, tensors

    def at(self, start: int, stop: int) -> Tensor:
        """Elements start .. stop of the buffer, which must lie within one run."""
        for (first, last), tensor in zip(self.held, self.tensors):
            if first <= start and stop <= last:
                return tensor[start - first : stop - first]
        raise AssertionError(f"elements {start}..{stop} of a shard that holds {self.held}")

    def values(self, slot: Slot) -> Tensor:
        """What it has of a parameter, flat; perhaps nothing."""
        mine = overlaps(self.held, slot.start, slot.stop)
        return self.at(*mine[0]) if mine else self.tensors[0][:0]

    def within(self, held: list[tuple[int, int]]) -> "Shard":
        """Some runs of it, in the same memory."""
        return self if held == self.held else Shard(held, [self.at(*run) for run in held])

    def zeros_like(self) -> "Shard":
        return Shard(self.held, [torch.zeros_like(tensor) for tensor in self.tensors])


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

    Passing tensors are `Transient`, one a bucket: `params_of`, `grads_of`. reduce_axis: the ranks over which gradients are summed.
    shard_axis: those of them among which owned things are divided, each owning its part of every bucket (ALONE: nothing is
    divided). replica_axis: the others. outer_axis: in stage 3, the others, if what is owned is divided further over them: a rank then
    holds a shard of parameters and gradients (`held_params`, `held_sums`) and owns, that is updates, a part of that. Else a rank owns
    what it holds. `summed_in_shards`: whether a rank gets the sums that it owns only. poison: for `Transient`.
    """

    def __init__(
        self,
        plan: BufferPlan,
        parameters: Mapping[str, nn.Parameter],
        reduce_axis: Axis,
        shard_axis: Axis,
        replica_axis: Axis,
        *,
        outer_axis: Axis = ALONE,
        stage: int = 0,
        summed_in_shards: bool = True,
        poison: bool = False,
        grad_dtype: torch.dtype | None = None,
    ):
        first = parameters[plan.slots[0].name]
        self.plan, self.reduce_axis, self.shard_axis, self.replica_axis = plan, reduce_axis, shard_axis, replica_axis
        self.outer_axis, self.stage, self.poison = outer_axis, stage, poison
        self.parameters = {slot.name: parameters[slot.name] for slot in plan.slots}
        self.dtype, self.master_dtype = first.dtype, torch.promote_types(first.dtype, torch.float32)
        self.grad_dtype = grad_dtype or self.master_dtype
        self.device = first.device
        self.held = plan.owned(shard_axis.rank, shard_axis.size)
        self.owned = plan.owned(shard_axis.rank * outer_axis.size + outer_axis.rank)
        self.params = MemoryBuffer(plan.numel, self.dtype, self.device)
        for slot in plan.slots:
            self.params.get(tuple(parameters[slot.name].shape), slot.start).copy_(parameters[slot.name].data)
        self.held_params = self._part_of(self.params.data)
        self.params_of = self.grads_of = ()
        if stage < 2:
            self.grads = MemoryBuffer(plan.numel, self.grad_dtype, self.device)
            self.held_sums = self._part_of(self.grads.data) if self.grad_dtype == self.master_dtype else self._no_sums()
            if not summed_in_shards:
                self.held_sums = Shard([(0, plan.numel)], [self.grads.data])
        else:
            self.grads, self.grads_of = None, self._transients(self.grad_dtype)
            self.held_sums = self._no_sums()
        if stage == 3:
            self.held_params = Shard(self.held, [tensor.clone() for tensor in self.held_params.tensors])
            self.params, self.params_of = None, self._transients(self.dtype)
        self.owned_params = self.held_params.within(self.owned)
        self.sums = self.held_sums.within(self.owned) if outer_axis.size > 1 else self.held_sums
        self._point_parameters()
        for passing in (*self.params_of, *self.grads_of):
            passing.release()

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

    def _no_sums(self) -> Shard:
        return Shard(self.held, [torch.zeros(b - a, dtype=self.master_dtype, device=self.device) for a, b in self.held])

    def _part_of(self, whole: Tensor) -> Shard:
        return Shard(self.held, [whole[start:stop] for start, stop in self.held])

    def _transients(self, dtype: torch.dtype) -> tuple[Transient, ...]:
        sizes = [bucket.stop - bucket.start for bucket in self.plan.buckets]
        return tuple(Transient(size, dtype, self.device, poison=self.poison) for size in sizes)

    def _point_parameters(self) -> None:
        """Make each parameter and its `main_grad` views of where their values lie."""
        bucket_of = {name: i for i, bucket in enumerate(self.plan.buckets) for name in bucket.names}
        for slot in self.plan.slots:
            i, parameter = bucket_of[slot.name], self.parameters[slot.name]
            shape, first = parameter.shape, self.plan.buckets[i].start
            params, grads = (
                whole.data[slot.start : slot.stop]
                if whole is not None
                else passing[i].data[slot.start - first : slot.stop - first]
                for whole, passing in ((self.params, self.params_of), (self.grads, self.grads_of))
            )
            parameter.data, parameter.main_grad = params.view(shape), grads.view(shape)


def _elements(slot: Slot, held: list[tuple[int, int]]) -> tuple[int, int]:
    mine = overlaps(held, slot.start, slot.stop)
    return (mine[0][0] - slot.start, mine[0][1] - slot.start) if mine else (0, 0)
