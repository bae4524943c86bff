"""Megatron's activations as functions, for the MLP of a script's own layer. A model's own are chosen by its settings."""

import torch
from torch import Tensor
from torch.nn import functional

from megatron.core.base.unsupported_arguments import accepts_defaults_only
from megatron.core.ops.activations import gated_region
from megatron.core.ops.fused_layer_ops import gated_silu, gelu


def bias_gelu_impl(input: Tensor, bias: Tensor | None) -> Tensor:
    """Return GELU, in its tanh form, of input + bias. input: [.., f], bias: [f] -> [.., f]"""
    return gelu(input, bias)


@accepts_defaults_only(fp8_input_store=False, cpu_offload_input=False)
def bias_swiglu_impl(input: Tensor, bias: Tensor | None) -> Tensor:
    """Return silu(gate) * up of input + bias. input: [.., gate | up], bias: [gate | up] -> [.., f]"""
    return gated_silu(input, bias)


def bias_geglu_impl(input: Tensor, bias: Tensor | None) -> Tensor:
    """Return gelu(gate) * up of input + bias, GELU in its tanh form. input: [.., gate | up], bias: [gate | up] -> [.., f]"""
    return gated_region("gelu-tanh").eager(input, bias)


def swiglu(y: Tensor) -> Tensor:
    """Return silu(gate) * up. y: [.., gate | up] -> [.., f]"""
    return gated_silu(y)


def geglu(y: Tensor) -> Tensor:
    """Return gelu(gate) * up, GELU in its tanh form. y: [.., gate | up] -> [.., f]"""
    return bias_geglu_impl(y, None)


def erf_gelu(x: Tensor) -> Tensor:
    """Return GELU. The shape stays."""
    return functional.gelu(x)


def openai_gelu(x: Tensor) -> Tensor:
    """Return GELU in its tanh form. The shape stays."""
    return gelu(x)


gelu_impl = fast_gelu = openai_gelu


def quick_gelu(x: Tensor) -> Tensor:
    """Return x sigmoid(1.702 x). The shape stays."""
    return x * torch.sigmoid(1.702 * x)


def squared_relu(x: Tensor) -> Tensor:
    """Return the square of ReLU. The shape stays."""
    return functional.relu(x).square()
