"""How a gradient is handed over: where it is added, and that it was.

A layer that adds gradients itself, instead of leaving them to autograd, goes through these functions. They do nothing
for a parameter that no `DistributedDataParallel` trains, which has no `slot` (`distributed/slot.py`).
"""

from torch import Tensor, nn


def open_main_grad(parameter: nn.Parameter | Tensor) -> Tensor | None:
    """Where gradients of the parameter are added: zeros, or their sum so far. None where it has no buffer."""
    if (slot := getattr(parameter, "slot", None)) is not None:
        slot.reduce.open(slot)
    return getattr(parameter, "main_grad", None)


def main_grad_and_beta(parameter: nn.Parameter | Tensor) -> tuple[Tensor | None, int]:
    """Where the caller puts beta x what is there + a gradient, as a matrix product can: beta is 0 for what may be the
    first gradient of a step. Nobody has set the memory to zero then, nor read it, which saves two of a step's passes
    over all gradients.
    """
    slot = getattr(parameter, "slot", None)
    beta = 0 if slot is not None and slot.reduce.open(slot, overwrites=True) else 1
    return getattr(parameter, "main_grad", None), beta


def grad_was_put_off(parameter: nn.Parameter | Tensor) -> None:
    """Say that the backward no longer needs the parameter's values, and that the gradient of one use comes later."""
    if (slot := getattr(parameter, "slot", None)) is not None:
        slot.reduce.put_off(slot)


def grad_was_added(parameter: nn.Parameter | Tensor) -> None:
    """Say that the gradient of one use is in `main_grad`."""
    if (slot := getattr(parameter, "slot", None)) is not None:
        slot.reduce.add(slot)
