"""What AdamW and SGD do to tensors, in place: torch's own functions, whose state is ours."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.optim.adamw import adamw
from torch.optim.sgd import sgd

from megatron.core.device import has_fused_adam

# (parameters, gradients, moments by kind, learning rate, weight decay, updates before) -> updates the first and the moments
Update = Callable[[list[Tensor], list[Tensor], dict[str, list[Tensor]], float, float, int], None]


def adam_update(*, beta1: float, beta2: float, eps: float) -> Update:
    """torch.optim.AdamW's step, in one pass over each tensor where the device has that."""

    def update(
        parameters: list[Tensor], gradients: list[Tensor], moments: dict[str, list[Tensor]], lr: float, weight_decay: float, updates: int
    ) -> None:  # fmt: skip
        device = parameters[0].device
        fused = has_fused_adam(device)
        steps = torch.full((len(parameters),), float(updates), device=device if fused else "cpu").unbind()
        adamw(
            parameters, gradients, moments["exp_avg"], moments["exp_avg_sq"], [], list(steps), fused=fused, amsgrad=False,
            maximize=False, beta1=beta1, beta2=beta2, eps=eps, lr=lr, weight_decay=weight_decay,
        )  # fmt: skip

    return update


def sgd_update(momentum: float) -> Update:
    """torch.optim.SGD's step: v = momentum v + (g + decay w); w -= lr v. Unlike Adam's, the decay passes through the momentum."""

    def update(
        parameters: list[Tensor], gradients: list[Tensor], moments: dict[str, list[Tensor]], lr: float, weight_decay: float, updates: int
    ) -> None:  # fmt: skip
        del updates
        sgd(
            parameters, gradients, moments.get("momentum_buffer", [None] * len(parameters)), momentum=momentum, dampening=0.0,
            nesterov=False, maximize=False, lr=lr, weight_decay=weight_decay,
        )  # fmt: skip

    return update
