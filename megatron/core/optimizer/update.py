"""What AdamW and SGD do to tensors, in place: torch's own functions, whose state is ours."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.optim.adamw import adamw
from torch.optim.sgd import sgd

from megatron.core.device import has_fused_adam

# (parameters, gradients, moments by kind, learning rate, weight decay, updates before, factor of the gradients) -> updates the first and
# the moments, and multiplies the gradients
Update = Callable[[list[Tensor], list[Tensor], dict[str, list[Tensor]], float, float, int, float], None]


def adam_update(*, beta1: float, beta2: float, eps: float) -> Update:
    """torch.optim.AdamW's step, in one pass over each tensor where the device has that, the multiplication of gradients included: a pass
    of its own for that is a quarter of the update's time (CPU)."""

    def update(
        parameters: list[Tensor],
        gradients: list[Tensor],
        moments: dict[str, list[Tensor]],
        lr: float,
        weight_decay: float,
        updates: int,
        factor: float,
    ) -> None:
        device = parameters[0].device
        fused = has_fused_adam(device)
        divisor = _as_divisor(factor, gradients) if fused else None
        if divisor is None:
            _multiply(gradients, factor)
        steps = torch.full((len(parameters),), float(updates), device=device if fused else "cpu").unbind()
        adamw(
            parameters,
            gradients,
            moments["exp_avg"],
            moments["exp_avg_sq"],
            [],
            list(steps),
            fused=fused,
            amsgrad=False,
            maximize=False,
            beta1=beta1,
            beta2=beta2,
            eps=eps,
            lr=lr,
            weight_decay=weight_decay,
            grad_scale=divisor,
        )

    return update


def sgd_update(momentum: float) -> Update:
    """torch.optim.SGD's step: v = momentum v + (g + decay w); w -= lr v. Unlike Adam's, the decay passes through the momentum."""

    def update(
        parameters: list[Tensor],
        gradients: list[Tensor],
        moments: dict[str, list[Tensor]],
        lr: float,
        weight_decay: float,
        updates: int,
        factor: float,
    ) -> None:
        del updates
        _multiply(gradients, factor)
        sgd(
            parameters,
            gradients,
            moments.get("momentum_buffer", [None] * len(parameters)),
            momentum=momentum,
            dampening=0.0,
            nesterov=False,
            maximize=False,
            lr=lr,
            weight_decay=weight_decay,
        )

    return update


def _as_divisor(factor: float, gradients: list[Tensor]) -> Tensor | None:
    """By what the fused kernel divides gradients: a float32, so that it is None where that would not be as exact as their own type."""
    if factor == 1 or gradients[0].dtype != torch.float32 or not 1e-30 < abs(factor) < 1e30:
        return None
    return torch.full((), 1 / factor, device=gradients[0].device)


def _multiply(gradients: list[Tensor], factor: float) -> None:
    if factor != 1:
        torch._foreach_mul_(gradients, factor)
