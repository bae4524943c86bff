"""Megatron's activation functions at their paths, against formulas, with gradients."""

import math
from importlib import import_module

import pytest
import torch

X = torch.tensor([[-3.0, -0.7, 0.2, 1.5], [0.0, 2.5, -1.1, 4.0]], dtype=torch.float64)
BIAS = torch.tensor([0.3, -0.2, 0.1, 0.5], dtype=torch.float64)


def tanh_gelu(x: float) -> float:
    return 0.5 * x * (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


FORMULAS = {
    "bias_gelu_impl": tanh_gelu,
    "openai_gelu": tanh_gelu,
    "gelu_impl": tanh_gelu,
    "fast_gelu": tanh_gelu,
    "erf_gelu": lambda x: 0.5 * x * (1 + math.erf(x / math.sqrt(2))),
    "quick_gelu": lambda x: x / (1 + math.exp(-1.702 * x)),
    "squared_relu": lambda x: max(x, 0.0) ** 2,
    "bias_swiglu_impl": lambda x: x / (1 + math.exp(-x)),
    "swiglu": lambda x: x / (1 + math.exp(-x)),
    "bias_geglu_impl": tanh_gelu,
    "geglu": tanh_gelu,
}
PATHS = {
    "megatron.core.fusions.fused_bias_gelu": "bias_gelu_impl",
    "megatron.core.fusions.fused_bias_swiglu": "bias_swiglu_impl swiglu",
    "megatron.core.fusions.fused_bias_geglu": "bias_geglu_impl geglu",
    "megatron.model.fused_bias_gelu": "bias_gelu_impl",
    "megatron.legacy.model.fused_bias_gelu": "bias_gelu_impl",
    "megatron.legacy.model.utils": "erf_gelu gelu_impl openai_gelu",
    "megatron.core.activations": "fast_gelu quick_gelu squared_relu",
    "megatron.training.activations": "fast_gelu quick_gelu squared_relu",
}


@pytest.mark.parametrize(("path", "name"), [(path, name) for path, names in PATHS.items() for name in names.split()])
def test_a_function_is_its_formula(path: str, name: str):
    function = getattr(import_module(path), name)
    arguments = (X, BIAS) if name.startswith("bias") else (X,)
    x = sum(arguments)
    if "glu" in name:
        gate, up = x.chunk(2, dim=-1)
        expected = [[FORMULAS[name](a) * b for a, b in zip(*rows)] for rows in zip(gate.tolist(), up.tolist())]
    else:
        expected = [[FORMULAS[name](a) for a in row] for row in x.tolist()]
    torch.testing.assert_close(function(*arguments), torch.tensor(expected, dtype=torch.float64))
    inputs = [argument.clone().requires_grad_() for argument in arguments]
    if name != "squared_relu":  # X has its kink
        assert torch.autograd.gradcheck(function, inputs)


def test_a_bias_may_be_absent_and_another_precision_is_refused():
    swiglu = import_module("megatron.core.fusions.fused_bias_swiglu").bias_swiglu_impl
    assert torch.equal(swiglu(X, None, False, False), swiglu(X, torch.zeros_like(BIAS)))
    with pytest.raises(NotImplementedError, match="fp8_input_store=True is not built"):
        swiglu(X, None, True)
