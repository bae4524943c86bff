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


class ParamAndGradBuffer:
    """The parameters of one plan end to end in `params`, and their gradients in `grads`, laid out alike.

    Each parameter becomes a view of the first and gets `main_grad`, a view of the second. Gradients are kept in float32 for
    half-precision parameters, so that many microbatches can be summed. `reduce_axis` is the axis they are summed over.
    """

    def __init__(self, plan: BufferPlan, parameters: Mapping[str, nn.Parameter], reduce_axis: Axis):
        first = parameters[plan.slots[0].name]
        self.plan, self.reduce_axis = plan, reduce_axis
        self.parameters = {slot.name: parameters[slot.name] for slot in plan.slots}
        self.params = MemoryBuffer(plan.numel, first.dtype, first.device)
        self.grads = MemoryBuffer(plan.numel, torch.promote_types(first.dtype, torch.float32), first.device)
        for slot in plan.slots:
            parameter = self.parameters[slot.name]
            view = self.params.get(tuple(parameter.shape), slot.start)
            view.copy_(parameter.data)
            parameter.data = view
            parameter.main_grad = self.grads.get(tuple(parameter.shape), slot.start)
