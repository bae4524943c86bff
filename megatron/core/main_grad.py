"""Gradient accumulation by layers: where a gradient goes, and the notice that it is there.

A layer that accumulates into `main_grad` itself, without autograd, calls these functions. For a parameter outside
`DistributedDataParallel`, which has no `slot` (`distributed/slot.py`), they do nothing.
"""

from torch import Tensor, nn


def open_main_grad(parameter: nn.Parameter | Tensor) -> Tensor | None:
    """The parameter's `main_grad`: zeros, or the sum of gradients so far. None if it has no buffer."""
    if (slot := getattr(parameter, "slot", None)) is not None:
        slot.reduce.open(slot)
    return getattr(parameter, "main_grad", None)


def main_grad_and_beta(parameter: nn.Parameter | Tensor) -> tuple[Tensor | None, int]:
    """(main_grad, beta): the caller computes main_grad = beta * main_grad + gradient, as a matrix product can.

    beta is 0 for the first gradient of a step: the memory is neither zeroed nor read, which saves two passes over all
    gradients per step.
    """
    slot = getattr(parameter, "slot", None)
    beta = 0 if slot is not None and slot.reduce.open(slot, overwrites=True) else 1
    return getattr(parameter, "main_grad", None), beta


def grad_was_put_off(parameter: nn.Parameter | Tensor) -> None:
    """Notes that the backward of one use has finished with the parameter's values, and that its gradient follows later."""
    if (slot := getattr(parameter, "slot", None)) is not None:
        slot.reduce.put_off(slot)


def grad_was_added(parameter: nn.Parameter | Tensor) -> None:
    """Notes that the gradient of one use is in `main_grad`."""
    if (slot := getattr(parameter, "slot", None)) is not None:
        slot.reduce.add(slot)
