"""What layers and schedules say to data parallelism: a layer where its gradient is, a schedule which part of a step begins.

A layer that accumulates gradients itself, instead of leaving them to autograd, calls these functions. They do nothing
for a parameter that no `DistributedDataParallel` trains: it has no `slot` (`distributed/param_grad_state.py`).

A schedule's model chunks are `DataParallelBase`s, or plain modules, which hear nothing.
"""

from typing import Any

from torch import Tensor, nn


class GradSlot:
    """What layers need of a `ParamSlot`, whose class they may not import."""

    name: str  # of the parameter
    bucket: Any  # a `Bucket`
    reduce: Any  # a `GradReduce`, which is told of gradients


def slot_of(tensor: Tensor) -> GradSlot | None:
    """The slot of a trained parameter, or of its main_grad; None: no `DistributedDataParallel` trains it."""
    return getattr(tensor, "slot", None)


def set_slot(tensor: Tensor, slot: GradSlot) -> None:
    tensor.slot = slot


def main_grad_of(parameter: Tensor) -> Tensor | None:
    """Where the parameter's gradient is accumulated, Megatron's name for it; None: in `.grad` alone."""
    return getattr(parameter, "main_grad", None)


def open_main_grad(parameter: nn.Parameter | Tensor) -> Tensor | None:
    """The tensor to add gradients of the parameter to: zeros, or their sum so far. None if the parameter has no
    buffer."""
    if (slot := slot_of(parameter)) is not None:
        slot.reduce.open(slot)
    return main_grad_of(parameter)


def main_grad_and_beta(parameter: nn.Parameter | Tensor) -> tuple[Tensor | None, int]:
    """(main_grad, beta): the caller sets main_grad to beta x main_grad + gradient, as a matrix product can.

    beta is 0 for the first gradient of a step. The memory is then neither set to zero nor read, which saves two passes
    over all gradients.
    """
    slot = slot_of(parameter)
    beta = 0 if slot is not None and slot.reduce.open(slot, overwrites=True) else 1
    return main_grad_of(parameter), beta


def grad_was_put_off(parameter: nn.Parameter | Tensor) -> None:
    """Report that the backward no longer needs the parameter's values, and that one gradient is deferred."""
    if (slot := slot_of(parameter)) is not None:
        slot.reduce.put_off(slot)


def grad_was_added(parameter: nn.Parameter | Tensor) -> None:
    """Report that the gradient of one use is in `main_grad`."""
    if (slot := slot_of(parameter)) is not None:
        slot.reduce.add(slot)


class DataParallelBase(nn.Module):
    """What a schedule calls of a model chunk under data parallelism. `DistributedDataParallel` inherits it, since the
    schedules
    may not import that class: a chunk of another class is a plain module to them."""

    def begin_microbatch(self, microbatch: int, *, backward: bool) -> None:
        """Called before a forward or backward of this microbatch."""
        raise NotImplementedError

    def start_grad_reduce(self) -> None:
        """Start to sum the step's gradients over the data-parallel ranks."""
        raise NotImplementedError

    def finish_grad_reduce(self) -> None:
        """Wait for the sums."""
        raise NotImplementedError

    def scale_gradients(self, scaling_factor: float) -> None:
        """Multiply every gradient of the chunk."""
        raise NotImplementedError
