"""The updates of AdamW and SGD, in place: torch's functions, with state that is ours."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim.adamw import adamw
from torch.optim.sgd import sgd

from megatron.core.optimizer.optimizer_flags_and_registry import OptimizerConfig
from megatron.core.parallel.accelerator import has_fused_adam


class UpdateStep(NamedTuple):
    """The numbers of one group's update."""

    lr: float
    weight_decay: float
    updates: int  # before this one
    factor: float = 1.0  # of the gradients
    betas: tuple[float, float] | None = None  # Adam's in this update; None: the settings'


Tensors = list[Tensor]
States = dict[str, Tensors]  # by name, each like the parameters
# (parameters, gradients, states by name, step): updates parameters and states in place, and multiplies the gradients.
# A whole-tensor update gets a list of ShardedMatrix as its last argument.
Update = Callable[..., None]


def make_update(config: OptimizerConfig, name: str | None) -> Update:
    """Return the update of the optimizer `name`; None: --optimizer. Raises ConfigError for an unknown name.

    It is called with (parameters, gradients, states by name, step): lists of tensors, gradient i and state i of the
    shape of parameter i, which is flat unless the update needs full matrices.
    """
    rule = config.rule(name)
    update = rule.update(config)
    if rule.scales:
        return update

    def multiply_and_update(
        parameters: Tensors, gradients: Tensors, states: States, step: UpdateStep, *matrices: Any
    ) -> None:
        _multiply(gradients, step.factor)
        update(parameters, gradients, states, step, *matrices)

    return multiply_and_update


def adam_update(
    parameters: Tensors, gradients: Tensors, states: States, step: UpdateStep, *, beta1: float, beta2: float, eps: float
) -> None:
    """Take torch.optim.AdamW's step, in one pass over each tensor if the device has a fused kernel.

    states: exp_avg, exp_avg_sq. Gradient i and state i have the shape of parameter i, [elements] of a flat buffer; all
    are changed in place. The fused kernel multiplies the gradients too: a separate pass for that takes a quarter of the
    update's time (CPU).
    """
    beta1, beta2 = step.betas or (beta1, beta2)
    device = parameters[0].device
    fused = has_fused_adam(device)
    divisor = _as_divisor(step.factor, gradients) if fused else None
    if divisor is None:
        _multiply(gradients, step.factor)
    steps = torch.full((len(parameters),), float(step.updates), device=device if fused else "cpu").unbind()
    adamw(
        parameters,
        gradients,
        states["exp_avg"],
        states["exp_avg_sq"],
        [],  # of AMSGrad
        list(steps),
        fused=fused,
        amsgrad=False,
        maximize=False,
        grad_scale=divisor,
        lr=step.lr,
        weight_decay=step.weight_decay,
        beta1=beta1,
        beta2=beta2,
        eps=eps,
    )


def adam_l2_update(parameters: Tensors, gradients: Tensors, states: States, step: UpdateStep, **rates: float) -> None:
    """Take torch.optim.Adam's step: the decay is added to the gradient (L2), not to the weights.

    The gradients are already multiplied by the step's factor. Shapes as in `adam_update`.
    """
    if step.weight_decay:
        torch._foreach_add_(gradients, parameters, alpha=step.weight_decay)
    adam_update(parameters, gradients, states, step._replace(weight_decay=0.0, factor=1.0), **rates)


def sgd_update(parameters: Tensors, gradients: Tensors, states: States, step: UpdateStep, *, momentum: float) -> None:
    """Take torch.optim.SGD's step: v = momentum v + (g + decay w); w -= lr v.

    Unlike in AdamW, the decay enters the momentum. states: momentum_buffer, unless the momentum is 0. Gradient i and
    state i have the shape of parameter i, [elements] of a flat buffer; all are changed in place.
    """
    momenta = states.get("momentum_buffer", [None] * len(parameters))
    sgd(
        parameters,
        gradients,
        momenta,
        dampening=0.0,
        nesterov=False,
        maximize=False,
        lr=step.lr,
        weight_decay=step.weight_decay,
        momentum=momentum,
    )


def _as_divisor(factor: float, gradients: list[Tensor]) -> Tensor | None:
    """Return the divisor of gradients for the fused kernel, a float32 scalar.

    None where that is less exact than the gradients' dtype.
    """
    if factor == 1 or gradients[0].dtype != torch.float32 or not 1e-30 < abs(factor) < 1e30:
        return None
    return torch.full((), 1 / factor, device=gradients[0].device)


def _multiply(gradients: list[Tensor], factor: float) -> None:
    if factor != 1:
        torch._foreach_mul_(gradients, factor)
