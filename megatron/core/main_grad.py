"""The hand-over of a gradient from a layer to data parallelism: where to accumulate it, and when it is there.

A layer that accumulates gradients itself, instead of leaving them to autograd, calls these functions. They do nothing
for a parameter that no `DistributedDataParallel` trains: it has no `slot` (`distributed/slot.py`).
"""

from torch import Tensor, nn


def open_main_grad(parameter: nn.Parameter | Tensor) -> Tensor | None:
    """The tensor to add gradients of the parameter to: zeros, or their sum so far. None if the parameter has no
    buffer."""
    if (slot := getattr(parameter, "slot", None)) is not None:
        slot.reduce.open(slot)
    return getattr(parameter, "main_grad", None)


def main_grad_and_beta(parameter: nn.Parameter | Tensor) -> tuple[Tensor | None, int]:
    """(main_grad, beta): the caller sets main_grad to beta x main_grad + gradient, as a matrix product can.

    beta is 0 for the first gradient of a step. The memory is then neither set to zero nor read, which saves two passes
    over all gradients.
    """
    slot = getattr(parameter, "slot", None)
    beta = 0 if slot is not None and slot.reduce.open(slot, overwrites=True) else 1
    return getattr(parameter, "main_grad", None), beta


def grad_was_put_off(parameter: nn.Parameter | Tensor) -> None:
    """Report that the backward no longer needs the parameter's values, and that one gradient is deferred."""
    if (slot := getattr(parameter, "slot", None)) is not None:
        slot.reduce.put_off(slot)


def grad_was_added(parameter: nn.Parameter | Tensor) -> None:
    """Report that the gradient of one use is in `main_grad`."""
    if (slot := getattr(parameter, "slot", None)) is not None:
        slot.reduce.add(slot)
