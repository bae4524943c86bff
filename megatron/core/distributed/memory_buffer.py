"""Contiguous memory that many tensors are views of."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from megatron.core.distributed.plan import BufferPlan
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

    def zeros_like(self) -> "Shard":
        return Shard(self.held, [torch.zeros_like(tensor) for tensor in self.tensors])


class ParamAndGradBuffer:
    """The parameters of one plan end to end in `params`, and their gradients in `grads`, laid out alike.

    Each parameter becomes a view of the first and gets `main_grad`, a view of the second. Gradients are kept in float32 for
    half-precision parameters, so that many microbatches can be summed.

    reduce_axis: the ranks over which gradients are summed. shard_axis: those of them among which optimizer state is divided, each
    owning its part of every bucket (ALONE: nothing is divided). replica_axis: the others. `summed` are the runs of `grads` that
    hold whole sums at the end of a step: what is owned, or, unless `summed_in_shards`, everything.
    """

    def __init__(
        self,
        plan: BufferPlan,
        parameters: Mapping[str, nn.Parameter],
        reduce_axis: Axis,
        shard_axis: Axis,
        replica_axis: Axis,
        *,
        summed_in_shards: bool = True,
    ):
        first = parameters[plan.slots[0].name]
        self.plan, self.reduce_axis, self.shard_axis, self.replica_axis = plan, reduce_axis, shard_axis, replica_axis
        self.parameters = {slot.name: parameters[slot.name] for slot in plan.slots}
        self.params = MemoryBuffer(plan.numel, first.dtype, first.device)
        self.grads = MemoryBuffer(plan.numel, torch.promote_types(first.dtype, torch.float32), first.device)
        self.owned = plan.owned(shard_axis.rank)
        self.summed = self.owned if summed_in_shards else [(0, plan.numel)]
        for slot in plan.slots:
            parameter = self.parameters[slot.name]
            view = self.params.get(tuple(parameter.shape), slot.start)
            view.copy_(parameter.data)
            parameter.data = view
            parameter.main_grad = self.grads.get(tuple(parameter.shape), slot.start)

    @property
    def is_half_precision(self) -> bool:
        """Whether the parameters are rounded copies of masters."""
        return self.params.dtype != self.grads.dtype

    def shard_of(self, buffer: MemoryBuffer) -> Shard:
        """What this rank owns of a buffer laid out like this one."""
        return Shard(self.owned, [buffer.data[start:stop] for start, stop in self.owned])
