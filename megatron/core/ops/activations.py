"""Activations of the MLP, plain and gated, each with its derivative.

tanh GELU and gated SiLU have formulas of their own in `fused_layer_ops`.
"""

import math
from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from megatron.core.ops.compile.compiled_region import CompiledRegion
from megatron.core.ops.region_formula_helpers import sum_over_rows, widen, widened_add_bias


class Activation(NamedTuple):
    """An elementwise function: all three take x [..] and return [..]."""

    eager: Callable[[Tensor], Tensor]
    value: Callable[[Tensor], Tensor]  # the same as a formula in float32 or wider
    slope: Callable[[Tensor], Tensor]  # its derivative, as a formula


# GELU is x times a cumulative distribution: the normal one, or its tanh form as a sigmoid (see `fused_layer_ops`).


def _tanh_cdf(x: Tensor) -> Tensor:
    return torch.sigmoid(_TWICE * x * (1 + _CUBED * x * x))


def _tanh_gelu_slope(x: Tensor) -> Tensor:
    cdf = _tanh_cdf(x)
    return cdf + _TWICE * x * (1 + 3 * _CUBED * x * x) * cdf * (1 - cdf)


def _normal_cdf(x: Tensor) -> Tensor:
    return 0.5 * (1 + torch.erf(x * math.sqrt(0.5)))


def _normal_gelu_slope(x: Tensor) -> Tensor:
    return _normal_cdf(x) + x * torch.exp(-0.5 * x * x) * (1 / math.sqrt(2 * math.pi))


def _swish(beta: float) -> Activation:
    """Swish (arXiv:1710.05941), x sigmoid(beta x): SiLU with beta 1, OpenAI's quick GELU with 1.702."""

    def swish(x: Tensor) -> Tensor:
        return x * torch.sigmoid(beta * x)

    def slope(x: Tensor) -> Tensor:
        sigmoid = torch.sigmoid(beta * x)
        return sigmoid * (1 + beta * x * (1 - sigmoid))

    return Activation(functional.silu if beta == 1 else swish, swish, slope)


_TWICE, _CUBED = 2 * math.sqrt(2 / math.pi), 0.044715
_FUNCTIONS = {
    "gelu-tanh": Activation(
        lambda x: functional.gelu(x, approximate="tanh"), lambda x: x * _tanh_cdf(x), _tanh_gelu_slope
    ),
    "gelu": Activation(functional.gelu, lambda x: x * _normal_cdf(x), _normal_gelu_slope),
    "quick-gelu": _swish(1.702),
    "relu": Activation(functional.relu, torch.relu, lambda x: (x > 0).to(x.dtype)),
    "squared-relu": Activation(
        lambda x: functional.relu(x).square(), lambda x: torch.relu(x).square(), lambda x: 2 * torch.relu(x)
    ),
    "silu": _swish(1.0),
}


def _plain_region(name: str) -> CompiledRegion:
    """Return the region of activation(x + bias)."""
    activation = _FUNCTIONS[name]

    def eager(x: Tensor, bias: Tensor | None = None) -> Tensor:
        return activation.eager(x if bias is None else x + bias)

    def forward(x: Tensor, bias: Tensor | None) -> tuple[Tensor]:
        return (activation.value(widened_add_bias(x, bias)).to(x.dtype),)

    def backward(grad: Tensor, x: Tensor, bias: Tensor | None) -> tuple[Tensor | None, ...]:
        grad_x = widen(grad) * activation.slope(widened_add_bias(x, bias))
        return grad_x.to(x.dtype), sum_over_rows(grad_x, bias)

    return CompiledRegion(eager, forward, backward, saved_inputs=(0, 1))


@cache
def gated_region(name: str, bound: float | None = None, offset: float = 0.0) -> CompiledRegion:
    """Return the region of activation(gate) * (up + offset), x: [.., gate | up] -> [.., f].

    bound: clamps the gate from above, and up on both sides.
    """
    activation = _FUNCTIONS[name]

    def split(x: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = x.chunk(2, dim=-1)
        if bound is not None:
            gate = gate.clamp(max=bound)
            up = up.clamp(-bound, bound)
        return gate, up

    def eager(x: Tensor, bias: Tensor | None = None) -> Tensor:
        gate, up = split(x if bias is None else x + bias)
        return activation.eager(gate) * (up + offset if offset else up)

    def forward(x: Tensor, bias: Tensor | None) -> tuple[Tensor]:
        gate, up = split(widened_add_bias(x, bias))
        return ((activation.value(gate) * (up + offset)).to(x.dtype),)

    def backward(grad: Tensor, x: Tensor, bias: Tensor | None) -> tuple[Tensor | None, ...]:
        wide = widened_add_bias(x, bias)
        grad = widen(grad)
        gate, up = split(wide)
        grad_gate = grad * (up + offset) * activation.slope(gate)
        grad_up = grad * activation.value(gate)
        grad_x = torch.cat((grad_gate, grad_up), dim=-1)
        if bound is not None:
            # Clamped numbers have no gradient; as in autograd, a number at the bound has one.
            unclamped_gate, unclamped_up = wide.chunk(2, dim=-1)
            is_inside = torch.cat((unclamped_gate <= bound, unclamped_up.abs() <= bound), dim=-1)
            grad_x = torch.where(is_inside, grad_x, 0)
        return grad_x.to(x.dtype), sum_over_rows(grad_x, bias)

    return CompiledRegion(eager, forward, backward, saved_inputs=(0, 1))


OTHER_ACTIVATIONS = {name: _plain_region(name) for name in _FUNCTIONS if name != "gelu-tanh"}
OTHER_ACTIVATIONS |= {f"gated_{name}": gated_region(name) for name in _FUNCTIONS if name != "silu"}
