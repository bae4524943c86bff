"""Activations of the MLP beside the two of most models, plain and gated, each with its slope."""

import math
from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from megatron.core.ops.compile.compiled_region import Region
from megatron.core.ops.region_formula_helpers import of_rows, plus_bias, wide_of


class Activation(NamedTuple):
    """A function of each number. value, slope: as formulas in float32 or wider."""

    eager: Callable[[Tensor], Tensor]
    value: Callable[[Tensor], Tensor]
    slope: Callable[[Tensor], Tensor]


def _tanh_share(x: Tensor) -> Tensor:
    return torch.sigmoid(_TWICE * x * (1 + _CUBED * x * x))


def _tanh_slope(x: Tensor) -> Tensor:
    share = _tanh_share(x)
    return share + _TWICE * x * (1 + 3 * _CUBED * x * x) * share * (1 - share)


def _normal_share(x: Tensor) -> Tensor:
    return 0.5 * (1 + torch.erf(x * math.sqrt(0.5)))


def _normal_slope(x: Tensor) -> Tensor:
    return _normal_share(x) + x * torch.exp(-0.5 * x * x) * (1 / math.sqrt(2 * math.pi))


def _swish(steepness: float) -> Activation:
    """x sigmoid(steepness x)"""

    def slope(x: Tensor) -> Tensor:
        share = torch.sigmoid(steepness * x)
        return share * (1 + steepness * x * (1 - share))

    eager = functional.silu if steepness == 1 else lambda x: x * torch.sigmoid(steepness * x)
    return Activation(eager, lambda x: x * torch.sigmoid(steepness * x), slope)


_TWICE, _CUBED = 2 * math.sqrt(2 / math.pi), 0.044715
_FUNCTIONS = {
    "gelu-tanh": Activation(
        lambda x: functional.gelu(x, approximate="tanh"), lambda x: x * _tanh_share(x), _tanh_slope
    ),
    "gelu": Activation(functional.gelu, lambda x: x * _normal_share(x), _normal_slope),
    "quick-gelu": _swish(1.702),
    "relu": Activation(functional.relu, torch.relu, lambda x: (x > 0).to(x.dtype)),
    "squared-relu": Activation(
        lambda x: functional.relu(x).square(), lambda x: torch.relu(x).square(), lambda x: 2 * torch.relu(x)
    ),
    "silu": _swish(1.0),
}


def _plain_region(name: str) -> Region:
    activation = _FUNCTIONS[name]

    def eager(x: Tensor, bias: Tensor | None = None) -> Tensor:
        return activation.eager(x if bias is None else x + bias)

    def forward(x: Tensor, bias: Tensor | None) -> tuple[Tensor]:
        return (activation.value(plus_bias(x, bias)).to(x.dtype),)

    def backward(grad: Tensor, x: Tensor, bias: Tensor | None) -> tuple[Tensor | None, ...]:
        grad_x = wide_of(grad) * activation.slope(plus_bias(x, bias))
        return grad_x.to(x.dtype), of_rows(grad_x, bias)

    return Region(eager, forward, backward, reads=(0, 1))


@cache
def gated_region(name: str, bound: float | None = None, offset: float = 0.0) -> Region:
    """activation(gate) * (up + offset), x: [.., gate | up]. bound: of the gate from above, and of up on both sides."""
    activation = _FUNCTIONS[name]

    def parts_of(x: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = x.chunk(2, dim=-1)
        return (gate, up) if bound is None else (gate.clamp(max=bound), up.clamp(-bound, bound))

    def eager(x: Tensor, bias: Tensor | None = None) -> Tensor:
        gate, up = parts_of(x if bias is None else x + bias)
        return activation.eager(gate) * (up + offset if offset else up)

    def forward(x: Tensor, bias: Tensor | None) -> tuple[Tensor]:
        gate, up = parts_of(plus_bias(x, bias))
        return ((activation.value(gate) * (up + offset)).to(x.dtype),)

    def backward(grad: Tensor, x: Tensor, bias: Tensor | None) -> tuple[Tensor | None, ...]:
        wide, g = plus_bias(x, bias), wide_of(grad)
        gate, up = parts_of(wide)
        grad_x = torch.cat((g * (up + offset) * activation.slope(gate), g * activation.value(gate)), dim=-1)
        if bound is not None:
            # As autograd has it: a number at the bound passes its gradient.
            first, second = wide.chunk(2, dim=-1)
            grad_x = torch.where(torch.cat((first <= bound, second.abs() <= bound), dim=-1), grad_x, 0)
        return grad_x.to(x.dtype), of_rows(grad_x, bias)

    return Region(eager, forward, backward, reads=(0, 1))


OTHER_ACTIVATIONS = {name: _plain_region(name) for name in _FUNCTIONS if name != "gelu-tanh"}
OTHER_ACTIVATIONS |= {f"gated_{name}": gated_region(name) for name in _FUNCTIONS if name != "silu"}
