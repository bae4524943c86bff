"""The regions of a layer: what lies between its products, eager and as the formulas that `--compile regions` compiles.

Formulas compute in float32 or wider and round once, at their end. Gradients of weights and biases are summed over all other
dimensions.
"""

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from megatron.core.ops.activations import OTHER_ACTIVATIONS, gated_region
from megatron.core.ops.compile.compiled_region import Region
from megatron.core.ops.dropout_masks import MaskWords, dropped
from megatron.core.ops.region_formula_helpers import of_rows, plus_bias, wide_of
from megatron.core.ops.rotary_formulas import Rotation, rotated, rotated_interleaved
from megatron.core.parallel.accelerator import is_accelerator

# ---------------------------------------------------------------- norms: (x, weight, bias or None, epsilon) -> (x, norm(x))


def _factor_of(weight: Tensor, plus: int) -> Tensor:
    """What a norm multiplies by: the weight, or 1 + weight without rounding the sum."""
    return wide_of(weight) + plus if plus else wide_of(weight)


def _layer_norm(plus: int) -> Region:
    def eager(x: Tensor, weight: Tensor, bias: Tensor | None, epsilon: float) -> tuple[Tensor, Tensor]:
        wide, factor = (wide_of(x), _factor_of(weight, plus)) if plus else (x, weight.to(x.dtype))
        added = None if bias is None else bias.to(wide.dtype)
        return x, functional.layer_norm(wide, weight.shape, factor, added, epsilon).to(weight.dtype)

    def forward(x: Tensor, weight: Tensor, bias: Tensor | None, epsilon: float) -> tuple[Tensor, ...]:
        wide = wide_of(x)
        mean = wide.mean(dim=-1, keepdim=True)
        centered = wide - mean
        scale = torch.rsqrt(centered.square().mean(dim=-1, keepdim=True) + epsilon)
        return again(x, weight, bias, mean, scale), mean, scale

    def again(x: Tensor, weight: Tensor, bias: Tensor | None, mean: Tensor, scale: Tensor) -> Tensor:
        product = (wide_of(x) - mean) * scale * _factor_of(weight, plus)
        return (product if bias is None else product + wide_of(bias)).to(weight.dtype)

    def backward(
        carried: Tensor, grad: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, mean: Tensor, scale: Tensor
    ) -> tuple[Tensor | None, ...]:
        normed, g = (wide_of(x) - mean) * scale, wide_of(grad)
        by_normed = g * _factor_of(weight, plus)
        inner = by_normed.mean(dim=-1, keepdim=True) + normed * (by_normed * normed).mean(dim=-1, keepdim=True)
        grad_x = (carried + (by_normed - inner) * scale).to(x.dtype)
        return grad_x, of_rows(g * normed, weight), of_rows(g, bias), None

    return Region(eager, forward, backward, reads=(0, 1, 2), carries=True, again=again)


def _rms_norm(plus: int) -> Region:
    def eager(x: Tensor, weight: Tensor, bias: None, epsilon: float) -> tuple[Tensor, Tensor]:
        wide, factor = (wide_of(x), _factor_of(weight, plus)) if plus else (x, weight.to(x.dtype))
        return x, functional.rms_norm(wide, weight.shape, factor, epsilon).to(weight.dtype)

    def forward(x: Tensor, weight: Tensor, bias: None, epsilon: float) -> tuple[Tensor, ...]:
        wide = wide_of(x)
        scale = torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + epsilon)
        return again(x, weight, bias, scale), scale

    def again(x: Tensor, weight: Tensor, bias: None, scale: Tensor) -> Tensor:
        return (wide_of(x) * scale * _factor_of(weight, plus)).to(weight.dtype)

    def backward(
        carried: Tensor, grad: Tensor, x: Tensor, weight: Tensor, bias: None, scale: Tensor
    ) -> tuple[Tensor | None, ...]:
        normed, g = wide_of(x) * scale, wide_of(grad)
        by_normed = g * _factor_of(weight, plus)
        inner = normed * (by_normed * normed).mean(dim=-1, keepdim=True)
        return (carried + (by_normed - inner) * scale).to(x.dtype), of_rows(g * normed, weight), None, None

    return Region(eager, forward, backward, reads=(0, 1, 2), carries=True, again=again)


NORMS = {"LayerNorm": _layer_norm(0), "RMSNorm": _rms_norm(0), "LayerNorm1p": _layer_norm(1), "RMSNorm1p": _rms_norm(1)}


# ---------------------------------------------------------------- activations: (x, bias or None) -> f(x + bias)


def gelu(x: Tensor, bias: Tensor | None = None) -> Tensor:
    """x * Phi(x) in its tanh form, as GPT-2's and Megatron's fused kernel."""
    return functional.gelu(x if bias is None else x + bias, approximate="tanh")


# (1 + tanh z) / 2 is sigmoid(2 z), which compilers compute in a third of the time: z = sqrt(2 / pi) (x + 0.044715 x^3)
_TWICE, _CUBED = 2 * math.sqrt(2 / math.pi), 0.044715


def _gelu(x: Tensor, bias: Tensor | None) -> tuple[Tensor]:
    wide = plus_bias(x, bias)
    return ((wide * torch.sigmoid(_TWICE * wide * (1 + _CUBED * wide * wide))).to(x.dtype),)


def _gelu_backward(grad: Tensor, x: Tensor, bias: Tensor | None) -> tuple[Tensor | None, ...]:
    wide = plus_bias(x, bias)
    square = wide * wide
    share = torch.sigmoid(_TWICE * wide * (1 + _CUBED * square))
    slope = _TWICE * wide * (1 + 3 * _CUBED * square)
    grad_x = wide_of(grad) * (share + slope * share * (1 - share))
    return grad_x.to(x.dtype), of_rows(grad_x, bias)


def gated_silu(x: Tensor, bias: Tensor | None = None) -> Tensor:
    """silu(gate) * up, x: [.., gate | up]"""
    gate, up = (x if bias is None else x + bias).chunk(2, dim=-1)
    return functional.silu(gate) * up


def _gated_silu(x: Tensor, bias: Tensor | None) -> tuple[Tensor]:
    gate, up = plus_bias(x, bias).chunk(2, dim=-1)
    return ((gate * torch.sigmoid(gate) * up).to(x.dtype),)


def _gated_silu_backward(grad: Tensor, x: Tensor, bias: Tensor | None) -> tuple[Tensor | None, ...]:
    gate, up = plus_bias(x, bias).chunk(2, dim=-1)
    share, g = torch.sigmoid(gate), wide_of(grad)
    grad_x = torch.cat((g * up * share * (1 + gate * (1 - share)), g * gate * share), dim=-1)
    return grad_x.to(x.dtype), of_rows(grad_x, bias)


# ---------------------------------------------------------------- the residual stream: (x, block's result, its mask) -> sum


def _eager_residual(
    x: Tensor, out: Tensor, lines: Tensor, columns: Tensor, probability: float, dtype: torch.dtype
) -> Tensor:
    return x + dropped(out, MaskWords(lines, columns), probability)


def _residual(
    x: Tensor, out: Tensor, lines: Tensor, columns: Tensor, probability: float, dtype: torch.dtype
) -> tuple[Tensor]:
    return (
        _eager_residual(x, wide_of(out), lines, columns, probability, dtype).to(torch.promote_types(x.dtype, dtype)),
    )


def _residual_backward(
    grad: Tensor, lines: Tensor, columns: Tensor, probability: float, dtype: torch.dtype
) -> tuple[Tensor | None, ...]:
    return grad, dropped(wide_of(grad), MaskWords(lines, columns), probability).to(dtype), None, None, None, None


# ---------------------------------------------------------------- heads: (fused, bias, cos, sin, heads of a group) -> q,
# k, v
# fused: [s, b, groups, heads of a group + 2, d], its last two heads key and value; cos, sin: [s, b or 1, width / 2]; or None


def _heads_by(rotate: Rotation) -> Region:
    def parted(fused: Tensor, cos: Tensor | None, sin: Tensor | None, queries: int) -> list[Tensor]:
        *both, v = (part.flatten(2, 3) for part in fused.split([queries, 1, 1], dim=3))
        return [*(x if cos is None else rotate(x, cos, sin) for x in both), v]

    def eager(
        fused: Tensor, bias: Tensor | None, cos: Tensor | None, sin: Tensor | None, queries: int
    ) -> tuple[Tensor, ...]:
        return tuple(parted(fused if bias is None else fused + bias.view(fused.shape[2:]), cos, sin, queries))

    def heads(
        fused: Tensor, bias: Tensor | None, cos: Tensor | None, sin: Tensor | None, queries: int
    ) -> tuple[Tensor, ...]:
        wide = plus_bias(fused, None if bias is None else bias.view(fused.shape[2:]))
        q, *others = (x.to(fused.dtype) for x in parted(wide, cos, sin, queries))
        return q.contiguous(), *map(_as_kernels_read, others)

    def heads_backward(
        grad_q: Tensor, grad_k: Tensor, grad_v: Tensor, bias: Tensor | None, cos: Tensor | None, *others: Any
    ) -> tuple[Tensor | None, ...]:
        groups, back = grad_k.shape[2], None if cos is None else -others[0]
        grads = (
            *(x if cos is None else rotate(x, cos, back) for x in (wide_of(grad_q), wide_of(grad_k))),
            wide_of(grad_v),
        )
        fused = torch.cat([x.unflatten(2, (groups, -1)) for x in grads], dim=3)
        return fused.to(grad_v.dtype), of_rows(fused.flatten(2), bias), None, None, None

    return Region(eager, heads, heads_backward, reads=(1, 2, 3, 4), results=3)


def _as_kernels_read(x: Tensor) -> Tensor:
    """Keys or values [s, b, n, d], on a CPU with the rows of each head side by side: its kernel reads them for each block of
    queries, both ways of 4 x 12 heads of 512 float32 rows in 68 instead of 81 ms. Queries stay as they are, since the
    kernel's
    result lies as they do."""
    if is_accelerator(x.device):
        return x.contiguous()
    return x.permute(1, 2, 0, 3).contiguous().permute(2, 0, 1, 3)


# ---------------------------------------------------------------- the table

REGIONS = {
    **NORMS,
    "gelu-tanh": Region(gelu, _gelu, _gelu_backward, reads=(0, 1)),
    "residual": Region(_eager_residual, _residual, _residual_backward, reads=(2, 3, 4, 5)),
    "heads": _heads_by(rotated),
    "heads_interleaved": _heads_by(rotated_interleaved),
    "gated_silu": Region(gated_silu, _gated_silu, _gated_silu_backward, reads=(0, 1)),
    **OTHER_ACTIVATIONS,
}


def activation_of(name: str, bound: float | None = None, offset: float = 0.0) -> Region:
    """The region of an MLP's function. bound, offset: of a gated one, whose name begins with gated_."""
    return REGIONS[name] if bound is None and offset == 0 else gated_region(name.removeprefix("gated_"), bound, offset)
