"""The regions of a layer: its elementwise work between matrix products, eager and as formulas for `--compile regions`.

Formulas compute in float32 or wider and round once, at their end. Gradients of weights and biases are summed over all
other dimensions.
"""

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from megatron.core.ops.activations import OTHER_ACTIVATIONS, gated_region
from megatron.core.ops.apply_rotary_angles import Rotation, rotated, rotated_interleaved
from megatron.core.ops.cached_blocks import rows_in_cache
from megatron.core.ops.compile.compiled_region import CompiledRegion
from megatron.core.ops.dropout_masks import MaskWords, dropped
from megatron.core.ops.region_formula_helpers import sum_over_rows, widen, widened_add_bias
from megatron.core.parallel.accelerator import is_accelerator

# ---------------------------------------------------------------- norms: (x, weight, bias or None, epsilon) -> (x, norm(x))
# They return x, the residual stream, so that their backward adds its gradient in the same pass. x: [s, b, h], weight: [h]


def _scale_by(weight: Tensor, plus: int) -> Tensor:
    """Return the factor of a norm: the weight, or 1 + weight without rounding the sum."""
    return widen(weight) + plus if plus else widen(weight)


def _layer_norm(plus: int) -> CompiledRegion:
    """LayerNorm. plus: 1 multiplies by 1 + weight (--apply-layernorm-1p)."""

    def eager(x: Tensor, weight: Tensor, bias: Tensor | None, epsilon: float) -> tuple[Tensor, Tensor]:
        inputs = widen(x) if plus else x
        factor = _scale_by(weight, plus) if plus else weight.to(x.dtype)
        offset = None if bias is None else bias.to(inputs.dtype)
        return x, functional.layer_norm(inputs, weight.shape, factor, offset, epsilon).to(weight.dtype)

    def forward(x: Tensor, weight: Tensor, bias: Tensor | None, epsilon: float) -> tuple[Tensor, ...]:
        wide = widen(x)
        mean = wide.mean(dim=-1, keepdim=True)  # [s, b, 1]
        centered = wide - mean
        inverse_std = torch.rsqrt(centered.square().mean(dim=-1, keepdim=True) + epsilon)  # [s, b, 1]
        return recompute(x, weight, bias, mean, inverse_std), mean, inverse_std

    def recompute(x: Tensor, weight: Tensor, bias: Tensor | None, mean: Tensor, inverse_std: Tensor) -> Tensor:
        out = (widen(x) - mean) * inverse_std * _scale_by(weight, plus)
        if bias is not None:
            out = out + widen(bias)
        return out.to(weight.dtype)

    def backward(
        grad_residual: Tensor,
        grad: Tensor,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        mean: Tensor,
        inverse_std: Tensor,
    ) -> tuple[Tensor | None, ...]:
        """Saved beside x, weight and bias: mean and 1 / standard deviation, [s, b, 1].

        x hat is computed again of them.
        """
        x_hat = (widen(x) - mean) * inverse_std
        grad = widen(grad)
        grad_x_hat = grad * _scale_by(weight, plus)
        inner = grad_x_hat.mean(dim=-1, keepdim=True) + x_hat * (grad_x_hat * x_hat).mean(dim=-1, keepdim=True)
        grad_x = (grad_residual + (grad_x_hat - inner) * inverse_std).to(x.dtype)
        return grad_x, sum_over_rows(grad * x_hat, weight), sum_over_rows(grad, bias), None

    return CompiledRegion(
        eager, forward, backward, saved_inputs=(0, 1, 2), returns_residual=True, recompute_output=recompute
    )


class _RmsNormOnCpu(torch.autograd.Function):
    """RMSNorm, to the bit as torch's, with a backward of its own.

    torch has no kernel for it on a CPU, and autograd derives its backward from six operations: for [2048, 256] on two
    threads it takes 6.5 ms, this one 1.5.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        """x: [.., h], weight: [h], of one dtype -> [.., h]"""
        inverse_rms = torch.rsqrt(x.square().mean(dim=-1, keepdim=True).add_(epsilon))  # [.., 1]
        ctx.save_for_backward(x, weight, inverse_rms)
        return (x * inverse_rms).mul_(weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """grad: [.., h] -> the gradients of x [.., h] and of the weight [h].

        Saved: x, the weight, and 1 / root mean square [.., 1]. With x hat = x / rms and g = grad * weight,
        grad_x = (g - x hat * mean(g * x hat)) / rms, grad_weight = sum of grad * x hat over the rows.
        """
        x, weight, inverse_rms = ctx.saved_tensors
        needs_x, needs_weight = ctx.needs_input_grad[:2]
        x_hat = x * inverse_rms
        terms = (grad * x_hat).reshape(-1, len(weight))  # [rows, h]
        grad_weight = terms.sum(dim=0) if needs_weight else None
        if not needs_x:
            return None, grad_weight, None
        minus_mean = torch.mv(terms, weight).div_(-len(weight)).view_as(inverse_rms)  # of g * x hat
        grad_x = x_hat.mul_(minus_mean).addcmul_(grad, weight).mul_(inverse_rms)
        return grad_x, grad_weight, None


def _rms_norm(plus: int) -> CompiledRegion:
    """RMSNorm (arXiv:1910.07467), without a bias. plus: 1 multiplies by 1 + weight."""

    def eager(x: Tensor, weight: Tensor, bias: None, epsilon: float) -> tuple[Tensor, Tensor]:
        inputs = widen(x) if plus else x
        factor = _scale_by(weight, plus) if plus else weight.to(x.dtype)
        if x.device.type == "cpu" and inputs.dtype in (torch.float32, torch.float64):
            return x, _RmsNormOnCpu.apply(inputs, factor, epsilon).to(weight.dtype)
        return x, functional.rms_norm(inputs, weight.shape, factor, epsilon).to(weight.dtype)

    def forward(x: Tensor, weight: Tensor, bias: None, epsilon: float) -> tuple[Tensor, ...]:
        wide = widen(x)
        inverse_rms = torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + epsilon)  # [s, b, 1]
        return recompute(x, weight, bias, inverse_rms), inverse_rms

    def recompute(x: Tensor, weight: Tensor, bias: None, inverse_rms: Tensor) -> Tensor:
        return (widen(x) * inverse_rms * _scale_by(weight, plus)).to(weight.dtype)

    def backward(
        grad_residual: Tensor, grad: Tensor, x: Tensor, weight: Tensor, bias: None, inverse_rms: Tensor
    ) -> tuple[Tensor | None, ...]:
        """Saved beside x and weight: 1 / root mean square, [s, b, 1], of which x hat is computed again."""
        x_hat = widen(x) * inverse_rms
        grad = widen(grad)
        grad_x_hat = grad * _scale_by(weight, plus)
        inner = x_hat * (grad_x_hat * x_hat).mean(dim=-1, keepdim=True)
        grad_x = (grad_residual + (grad_x_hat - inner) * inverse_rms).to(x.dtype)
        return grad_x, sum_over_rows(grad * x_hat, weight), None, None

    return CompiledRegion(
        eager, forward, backward, saved_inputs=(0, 1, 2), returns_residual=True, recompute_output=recompute
    )


NORMS = {"LayerNorm": _layer_norm(0), "RMSNorm": _rms_norm(0), "LayerNorm1p": _layer_norm(1), "RMSNorm1p": _rms_norm(1)}


# ---------------------------------------------------------------- activations: (x, bias or None) -> f(x + bias)
# x: [s, b, f], or [s, b, 2 f] of a gated one; bias: of the last dimension. Saved: both.


def gelu(x: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return GELU of x + bias in its tanh form, as GPT-2's and Megatron's fused kernel.

    x: [.., f], bias: [f] -> [.., f]
    """
    return functional.gelu(x if bias is None else x + bias, approximate="tanh")


# (1 + tanh z) / 2 is sigmoid(2 z), which compilers compute in a third of the time: z = sqrt(2 / pi) (x + 0.044715 x^3)
_TWICE, _CUBED = 2 * math.sqrt(2 / math.pi), 0.044715


def _gelu(x: Tensor, bias: Tensor | None) -> tuple[Tensor]:
    wide = widened_add_bias(x, bias)
    return ((wide * torch.sigmoid(_TWICE * wide * (1 + _CUBED * wide * wide))).to(x.dtype),)


def _gelu_backward(grad: Tensor, x: Tensor, bias: Tensor | None) -> tuple[Tensor | None, ...]:
    wide = widened_add_bias(x, bias)
    square = wide * wide
    sigmoid = torch.sigmoid(_TWICE * wide * (1 + _CUBED * square))
    slope = _TWICE * wide * (1 + 3 * _CUBED * square)  # x times the derivative of the sigmoid's argument
    grad_x = widen(grad) * (sigmoid + slope * sigmoid * (1 - sigmoid))
    return grad_x.to(x.dtype), sum_over_rows(grad_x, bias)


class _GatedSilu(torch.autograd.Function):
    """silu(gate) * up, with the gradients of both written to one tensor: autograd itself would join two by a copy.

    It saves x alone, and computes silu(gate) again.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """x: [.., gate | up] -> [.., f]"""
        ctx.save_for_backward(x)
        out = x.new_empty((*x.shape[:-1], x.shape[-1] // 2))
        for of_x, of_out in _blocks_of_rows(x, out):
            gate, up = of_x.chunk(2, dim=-1)
            torch.ops.aten.silu.out(gate, out=of_out).mul_(up)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        """grad: [.., f] -> [.., gate | up]. Saved: x."""
        (x,) = ctx.saved_tensors
        grad_x = x.new_empty(x.shape)
        for of_x, of_grad, of_grad_x in _blocks_of_rows(x, grad, grad_x):
            gate, up = of_x.chunk(2, dim=-1)
            grad_gate, grad_up = of_grad_x.chunk(2, dim=-1)
            torch.mul(of_grad, functional.silu(gate), out=grad_up)
            torch.ops.aten.silu_backward.grad_input(of_grad * up, gate, grad_input=grad_gate)
        return grad_x


def _blocks_of_rows(x: Tensor, *others: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Return blocks of the same rows of tensors [.., width], [rows, width] each.

    On a CPU a block of x fits the cache, where the next operation finds it; on an accelerator x is one block.
    """
    width = x.shape[-1]
    rows = rows_in_cache(width) if x.device.type == "cpu" else max(1, x.numel() // width)
    return zip(*(each.reshape(-1, each.shape[-1]).split(rows) for each in (x, *others)))


def gated_silu(x: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return silu(gate) * up of x + bias. x: [.., gate | up], bias: [gate | up] -> [.., f]"""
    return _GatedSilu.apply(x if bias is None else x + bias)


def _gated_silu(x: Tensor, bias: Tensor | None) -> tuple[Tensor]:
    gate, up = widened_add_bias(x, bias).chunk(2, dim=-1)
    return ((gate * torch.sigmoid(gate) * up).to(x.dtype),)


def _gated_silu_backward(grad: Tensor, x: Tensor, bias: Tensor | None) -> tuple[Tensor | None, ...]:
    gate, up = widened_add_bias(x, bias).chunk(2, dim=-1)
    sigmoid = torch.sigmoid(gate)
    grad = widen(grad)
    grad_gate = grad * up * sigmoid * (1 + gate * (1 - sigmoid))
    grad_up = grad * gate * sigmoid
    grad_x = torch.cat((grad_gate, grad_up), dim=-1)
    return grad_x.to(x.dtype), sum_over_rows(grad_x, bias)


# ---------------------------------------------------------------- the residual stream: (x, block's output, its mask) -> sum
# x, out: [s, b, h]. Saved: the words of the dropout mask, which is drawn again. dtype: of the block's output.


def _eager_residual(
    x: Tensor, out: Tensor, lines: Tensor, columns: Tensor, probability: float, dtype: torch.dtype
) -> Tensor:
    return x + dropped(out, MaskWords(lines, columns), probability)


def _residual(
    x: Tensor, out: Tensor, lines: Tensor, columns: Tensor, probability: float, dtype: torch.dtype
) -> tuple[Tensor]:
    total = _eager_residual(x, widen(out), lines, columns, probability, dtype)
    return (total.to(torch.promote_types(x.dtype, dtype)),)


def _residual_backward(
    grad: Tensor, lines: Tensor, columns: Tensor, probability: float, dtype: torch.dtype
) -> tuple[Tensor | None, ...]:
    grad_out = dropped(widen(grad), MaskWords(lines, columns), probability).to(dtype)
    return grad, grad_out, None, None, None, None


# ---------------------------------------------------------------- heads: (fused, bias, cos, sin, queries of a group) -> q, k, v
# fused: [s, b, groups, queries of a group + 2, d], its last two heads key and value. bias: of all fused heads, flat.
# cos, sin: [s, b or 1, width / 2], or None without rotary positions. -> q [s, b, n, d]; k, v [s, b, groups, d]


def _split_heads_by(rotate: Rotation) -> CompiledRegion:
    def split(fused: Tensor, cos: Tensor | None, sin: Tensor | None, queries: int) -> list[Tensor]:
        q, k, v = (heads.flatten(2, 3) for heads in fused.split([queries, 1, 1], dim=3))
        if cos is not None:
            q = rotate(q, cos, sin)
            k = rotate(k, cos, sin)
        return [q, k, v]

    def eager(
        fused: Tensor, bias: Tensor | None, cos: Tensor | None, sin: Tensor | None, queries: int
    ) -> tuple[Tensor, ...]:
        if bias is not None:
            fused = fused + bias.view(fused.shape[2:])
        return tuple(split(fused, cos, sin, queries))

    def heads(
        fused: Tensor, bias: Tensor | None, cos: Tensor | None, sin: Tensor | None, queries: int
    ) -> tuple[Tensor, ...]:
        wide = widened_add_bias(fused, None if bias is None else bias.view(fused.shape[2:]))
        q, k, v = (x.to(fused.dtype) for x in split(wide, cos, sin, queries))
        return q.contiguous(), _as_kernels_read(k), _as_kernels_read(v)

    def heads_backward(
        grad_q: Tensor,
        grad_k: Tensor,
        grad_v: Tensor,
        bias: Tensor | None,
        cos: Tensor | None,
        sin: Tensor | None,
        queries: int,
    ) -> tuple[Tensor | None, ...]:
        """Saved: bias, cosines and sines. The gradient of a rotation is rotated back: by the negative sine."""
        groups = grad_k.shape[2]
        wide_q = widen(grad_q)
        wide_k = widen(grad_k)
        if cos is not None:
            back = -sin
            wide_q = rotate(wide_q, cos, back)
            wide_k = rotate(wide_k, cos, back)
        grads = (wide_q, wide_k, widen(grad_v))
        fused = torch.cat([x.unflatten(2, (groups, -1)) for x in grads], dim=3)  # as `fused` of the forward
        return fused.to(grad_v.dtype), sum_over_rows(fused.flatten(2), bias), None, None, None

    return CompiledRegion(eager, heads, heads_backward, saved_inputs=(1, 2, 3, 4), num_results=3)


def _as_kernels_read(x: Tensor) -> Tensor:
    """Lay out keys or values [s, b, n, d] for the attention kernel of the device; the shape is unchanged.

    On a CPU the rows of each head are side by side: its kernel reads them for each block of queries, both ways of 4
    x 12 heads of 512 float32 rows in 68 instead of 81 ms. Queries are not laid out so, since the kernel's result
    has their layout.
    """
    if is_accelerator(x.device):
        return x.contiguous()
    return x.permute(1, 2, 0, 3).contiguous().permute(2, 0, 1, 3)


# ---------------------------------------------------------------- the table

REGIONS = {
    **NORMS,
    "gelu-tanh": CompiledRegion(gelu, _gelu, _gelu_backward, saved_inputs=(0, 1)),
    "residual": CompiledRegion(_eager_residual, _residual, _residual_backward, saved_inputs=(2, 3, 4, 5)),
    "heads": _split_heads_by(rotated),
    "heads_interleaved": _split_heads_by(rotated_interleaved),
    "gated_silu": CompiledRegion(gated_silu, _gated_silu, _gated_silu_backward, saved_inputs=(0, 1)),
    **OTHER_ACTIVATIONS,
}


def activation_of(name: str, bound: float | None = None, offset: float = 0.0) -> CompiledRegion:
    """Return the region of an MLP's activation: x [.., f], or [.., 2 f] of a gated one, bias or None -> [.., f].

    bound, offset: of a gated one (`gated_region`), whose name begins with gated_. Raises KeyError for an unknown name.
    """
    if bound is None and offset == 0:
        return REGIONS[name]
    return gated_region(name.removeprefix("gated_"), bound, offset)
