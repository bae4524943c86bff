"""Calls of layers and schedules to data parallelism, without importing it.

A layer that accumulates a gradient into `main_grad` itself, instead of leaving it to autograd, opens `main_grad` before
and reports the gradient after. The functions do nothing for a parameter that no `DistributedDataParallel` trains: it
has no `slot` (`distributed/param_grad_state.py`).

A schedule tells its model chunks which part of a step begins: those that are `DataParallelChunkInterface`s, not plain modules.
"""

from typing import Any

from torch import Tensor, nn


class GradSlot:
    """The attributes of a `ParamSlot` that layers use; they may not import its class."""

    name: str  # of the parameter
    bucket: Any  # a `Bucket`
    reduce: Any  # a `GradReduce`, to which gradients are reported


def slot_of(tensor: Tensor) -> GradSlot | None:
    """Return the slot of a trained parameter, or of its main_grad.

    None: no `DistributedDataParallel` trains it. tensor: of any shape; only its attribute is read.
    """
    return getattr(tensor, "slot", None)


def set_slot(tensor: Tensor, slot: GradSlot) -> None:
    """Set the slot of a parameter, or of its main_grad, of any shape."""
    tensor.slot = slot


def main_grad_of(parameter: Tensor) -> Tensor | None:
    """Return the tensor in which the parameter's gradient is accumulated, by Megatron's name: [parameter's shape].

    None: it is accumulated in `.grad` alone.
    """
    return getattr(parameter, "main_grad", None)


def open_main_grad(parameter: nn.Parameter | Tensor) -> Tensor | None:
    """Return the tensor to add gradients of the parameter to, [parameter's shape]: zeros, or their sum so far.

    None if the parameter has no gradient buffer. With ZeRO stage 2 or 3 released memory is allocated again, after the
    sum in flight over the same memory has ended.
    """
    if (slot := slot_of(parameter)) is not None:
        slot.reduce.open(slot)
    return main_grad_of(parameter)


def main_grad_and_beta(parameter: nn.Parameter | Tensor) -> tuple[Tensor | None, int]:
    """Return (main_grad, beta): the caller sets main_grad to beta x main_grad + gradient, as a matrix product can.

    beta is 0 for the first gradient of a step. The memory is then neither set to zero nor read, which saves two passes
    over all gradients. main_grad: [parameter's shape]; None as from `open_main_grad`.
    """
    slot = slot_of(parameter)
    is_first_of_step = slot is not None and slot.reduce.open(slot, overwrites=True)
    beta = 0 if is_first_of_step else 1
    return main_grad_of(parameter), beta


def grad_was_deferred(parameter: nn.Parameter | Tensor) -> None:
    """Report that one gradient is deferred, and that this backward no longer needs the parameter's values.

    parameter: of any shape.
    """
    if (slot := slot_of(parameter)) is not None:
        slot.reduce.defer(slot)


def grad_was_added(parameter: nn.Parameter | Tensor) -> None:
    """Report that the gradient of one use is in `main_grad`. parameter: of any shape.

    This may start the reduction of a bucket over the data-parallel ranks: all of them must report the same gradients.
    Raises RuntimeError after the reduction of the step began.
    """
    if (slot := slot_of(parameter)) is not None:
        slot.reduce.add(slot)


class DataParallelChunkInterface(nn.Module):
    """The methods of a model chunk under data parallelism that schedules call.

    `DistributedDataParallel` inherits it, since schedules may not import that class; a chunk of another class is a
    plain module to them.
    """

    def zero_grad_buffer(self, num_microbatches: int | None = None) -> None:
        """Forget the gradients of the last step. num_microbatches: of the next."""
        raise NotImplementedError

    def begin_microbatch(self, microbatch: int, *, backward: bool) -> None:
        """Prepare for a forward or backward of this microbatch."""
        raise NotImplementedError

    def start_grad_reduce(self) -> None:
        """Start to reduce the step's gradients over the data-parallel ranks."""
        raise NotImplementedError

    def finish_grad_reduce(self) -> None:
        """Wait for the reduced gradients."""
        raise NotImplementedError

    def scale_gradients(self, scaling_factor: float) -> None:
        """Multiply every gradient of the chunk."""
        raise NotImplementedError
