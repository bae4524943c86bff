"""Contiguous memory that many tensors are views of."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from megatron.core.distributed.plan import BufferPlan, Slot, overlaps
from megatron.core.grid import Axis


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

    def zeros_like(self) -> "Shard":
        return Shard(self.held, [torch.zeros_like(tensor) for tensor in self.tensors])


class Transient:
    """A flat tensor whose memory comes and goes, while views of it stay: parameters and gradients that are whole for a while.

    It begins open, since torch makes views of memory that is there only.
    """

    def __init__(self, numel: int, dtype: torch.dtype, device: torch.device | str = "cpu"):
        self.data = torch.empty(numel, dtype=dtype, device=device)
        self._bytes = self.data.untyped_storage().nbytes()

    @property
    def is_open(self) -> bool:
        return self.data.untyped_storage().nbytes() == self._bytes

    def open(self) -> Tensor:
        """The tensor with its memory, which is not set to anything."""
        if not self.is_open:
            self.data.untyped_storage().resize_(self._bytes)
        return self.data

    def release(self) -> None:
        self.data.untyped_storage().resize_(0)


class ParamAndGradBuffer:
    """The parameters of one plan end to end, and their gradients laid out alike.

    Each parameter becomes a view of the first, and its `main_grad` a view of the second. Gradients are kept in float32 for
    half-precision parameters, so that many microbatches can be summed. What lies where, by ZeRO stage:

        stage   params   grads    owned_params     sums, what a step's gradients become
        0       whole    whole    all of params    all of grads
        1       whole    whole    a part of params a part of grads
        2       whole    passing  a part of params own memory
        3       passing  passing  own memory       own memory

    Passing tensors are `Transient`, one a bucket: `params_of`, `grads_of`. reduce_axis: the ranks over which gradients are summed.
    shard_axis: those of them among which owned things are divided, each owning its part of every bucket (ALONE: nothing is
    divided). replica_axis: the others. `summed_in_shards`: whether a rank gets the sums that it owns only.
    """

    def __init__(
        self,
        plan: BufferPlan,
        parameters: Mapping[str, nn.Parameter],
        reduce_axis: Axis,
        shard_axis: Axis,
        replica_axis: Axis,
        *,
        stage: int = 0,
        summed_in_shards: bool = True,
    ):
        first = parameters[plan.slots[0].name]
        self.plan, self.reduce_axis, self.shard_axis, self.replica_axis = plan, reduce_axis, shard_axis, replica_axis
        self.stage = stage
        self.parameters = {slot.name: parameters[slot.name] for slot in plan.slots}
        self.dtype, self.grad_dtype = first.dtype, torch.promote_types(first.dtype, torch.float32)
        self.device = first.device
        self.owned = plan.owned(shard_axis.rank)
        self.params = MemoryBuffer(plan.numel, self.dtype, self.device)
        for slot in plan.slots:
            self.params.get(tuple(parameters[slot.name].shape), slot.start).copy_(parameters[slot.name].data)
        self.owned_params = self._part_of(self.params.data)
        self.params_of = self.grads_of = ()
        if stage < 2:
            self.grads = MemoryBuffer(plan.numel, self.grad_dtype, self.device)
            self.sums = self._part_of(self.grads.data)
            if not summed_in_shards:
                self.sums = Shard([(0, plan.numel)], [self.grads.data])
        else:
            self.grads, self.grads_of = None, self._transients(self.grad_dtype)
            self.sums = Shard(
                self.owned, [torch.zeros(b - a, dtype=self.grad_dtype, device=self.device) for a, b in self.owned]
            )
        if stage == 3:
            self.owned_params = Shard(self.owned, [tensor.clone() for tensor in self.owned_params.tensors])
            self.params, self.params_of = None, self._transients(self.dtype)
        self._point_parameters()
        for passing in (*self.params_of, *self.grads_of):
            passing.release()

    @property
    def is_half_precision(self) -> bool:
        """Whether the parameters are rounded copies of masters."""
        return self.dtype != self.grad_dtype

    def kept(self, slot: Slot) -> tuple[int, int]:
        """Which elements of a parameter, in row-major order, this rank owns."""
        mine = overlaps(self.owned, slot.start, slot.stop)
        return (mine[0][0] - slot.start, mine[0][1] - slot.start) if mine else (0, 0)

    def _part_of(self, whole: Tensor) -> Shard:
        return Shard(self.owned, [whole[start:stop] for start, stop in self.owned])

    def _transients(self, dtype: torch.dtype) -> tuple[Transient, ...]:
        return tuple(Transient(bucket.stop - bucket.start, dtype, self.device) for bucket in self.plan.buckets)

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
