"""How a gradient is handed over: where it is added, and that it was.

`DistributedDataParallel` sets on each parameter that it trains: `main_grad`, a view of a gradient buffer;
`open_grad()`, which makes it ready to be added to; `grad_written()`, to be called once for each gradient that was
added; and `grad_put_off()`, for each that will be. A model says in `uses` of a parameter how many gradients one
backward adds, where that is not one (a tied word table: two). A layer that adds gradients itself, instead of leaving
them to autograd, goes through these functions.
"""

from torch import Tensor, nn


def open_main_grad(parameter: nn.Parameter | Tensor) -> Tensor | None:
    """Where gradients of the parameter are added: zeros, or their sum so far. None where it has no buffer."""
    if (open_grad := getattr(parameter, "open_grad", None)) is not None:
        open_grad()
    return getattr(parameter, "main_grad", None)


def main_grad_and_beta(parameter: nn.Parameter | Tensor) -> tuple[Tensor | None, int]:
    """Where the caller puts beta x what is there + a gradient, as a matrix product can: beta is 0 for what may be the
    first gradient of a step. Nobody has set the memory to zero then, nor read it, which saves two of a step's passes
    over all gradients.
    """
    open_grad = getattr(parameter, "open_grad", None)
    beta = 0 if open_grad is not None and open_grad(overwrites=True) else 1
    return getattr(parameter, "main_grad", None), beta


def grad_was_put_off(parameter: nn.Parameter | Tensor) -> None:
    """Say that the backward no longer needs the parameter's values, and that the gradient of one use comes later."""
    if (put_off := getattr(parameter, "grad_put_off", None)) is not None:
        put_off()


def grad_was_added(parameter: nn.Parameter | Tensor) -> None:
    """Say that the gradient of one use is in `main_grad`."""
    if (written := getattr(parameter, "grad_written", None)) is not None:
        written()
