"""Data parallelism: a model chunk whose gradients lie in contiguous buffers, each summed by one collective.

    backward        every gradient is added to its parameter's `main_grad`, a view of a buffer
    REDUCE action   start_grad_reduce(): sums what is in parts over other axes, then begins the sum over the data-parallel ranks
    end of step     finish_grad_reduce(): waits, and sums what first and last stage share

A buffer holds the parameters of one dtype that are reduced over one group; a tied embedding has a buffer of its own, laid out
alike on the first and the last stage.
"""

from typing import Any

import torch
from torch import Tensor, nn

from megatron.core import comm
from megatron.core.boxes import slices
from megatron.core.distributed.memory_buffer import ParamAndGradBuffer
from megatron.core.distributed.plan import Item, lay_out
from megatron.core.parallel_state import Mesh
from megatron.core.placement import Placement, partial_grads

ACROSS_STAGES = "embd"  # the one axis whose ranks finish their backward at different times


class DistributedDataParallel(nn.Module):
    """Wraps one model chunk. Every rank of the chunk's data- and tensor-parallel groups must wrap its own and call alike.

    A parameter without a placement (of a plain torch module) is taken to be whole on every rank.
    """

    def __init__(self, module: nn.Module, mesh: Mesh):
        super().__init__()
        self.module, self.mesh = module, mesh
        self._pending: list[comm.Pending] = []
        trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
        for parameter in trained.values():
            if not hasattr(parameter, "placement"):
                parameter.placement = Placement(tuple(parameter.shape), init=None, replicated_over=("tp",))
        items = [Item(name, p.numel(), _buffer_key(p)) for name, p in trained.items()]
        self.buffers = [
            ParamAndGradBuffer(plan, trained, mesh.over(trained[plan.slots[0].name].placement.reduce_over))
            for plan in lay_out(items)
        ]
        for parameter in trained.values():
            parameter.register_post_accumulate_grad_hook(_move_to_main_grad)

    def forward(self, *inputs: Any, **options: Any) -> Any:
        return self.module(*inputs, **options)

    def set_input_tensor(self, x: Tensor | None) -> None:
        self.module.set_input_tensor(x)

    def zero_grad_buffer(self) -> None:
        """Forget the gradients of the step before."""
        for buffer in self.buffers:
            buffer.grads.zero()

    def start_grad_reduce(self) -> None:
        """Begin to sum the gradients; no backward of this chunk may follow before `finish_grad_reduce`."""
        for name in self.mesh:
            if name != ACROSS_STAGES:
                self._sum_partial(name)
        self._pending = [comm.start_all_reduce(buffer.grads.data, buffer.reduce_axis) for buffer in self.buffers]

    def finish_grad_reduce(self) -> None:
        """Every gradient is the sum over all samples of the step when this returns."""
        for pending in self._pending:
            pending.wait()
        self._pending = []
        for buffer in self.buffers:
            if ACROSS_STAGES in _partial_grad(buffer):
                comm.all_reduce(buffer.grads.data, self.mesh[ACROSS_STAGES])

    def scale_grads(self, factor: float) -> None:
        for buffer in self.buffers:
            buffer.grads.data.mul_(factor)

    def _sum_partial(self, axis_name: str) -> None:
        """Sum the gradients of which each rank of the axis has a part (norms under sequence parallelism, shared key/value
        heads), in one message."""
        for buffer in self.buffers:
            parts = [
                p.main_grad[slices(box)]
                for p in buffer.parameters.values()
                for box in partial_grads(p.placement, tuple(p.shape), axis_name)
            ]
            if not parts or self.mesh[axis_name].size == 1:
                continue
            flat = comm.all_reduce(torch.cat([part.reshape(-1) for part in parts]), self.mesh[axis_name])
            for part, total in zip(parts, flat.split([part.numel() for part in parts])):
                part.copy_(total.view_as(part))


def _buffer_key(parameter: nn.Parameter) -> tuple:
    placement = parameter.placement
    return placement.reduce_over, parameter.dtype, ACROSS_STAGES in placement.partial_grad


def _partial_grad(buffer: ParamAndGradBuffer) -> tuple[str, ...]:
    return next(iter(buffer.parameters.values())).placement.partial_grad


def _move_to_main_grad(parameter: nn.Parameter) -> None:
    """Add what autograd has left in `.grad`. A linear layer has written into the buffer itself, and left nothing."""
    if parameter.grad is not None:
        parameter.main_grad.add_(parameter.grad)
        parameter.grad = None
