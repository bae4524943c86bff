"""Causal attention in tiles of queries, compiled, with dropout or without: no s x s tensor.

As in FlashAttention-2 (arXiv:2307.08691, algorithms 1 and 2) the forward saves q, k, v, its result and log(sum exp) of each
row, and the backward computes the scores again. Without dropout a CPU takes torch's forward, which saves the same.
"""

import math
from typing import Any

import torch
from torch import Tensor

from megatron.core.ops.attention.masks import Mask
from megatron.core.ops.attention.tiles import by_head, tiles_of, wide_empty
from megatron.core.ops.compile.compiled_region import Compiled
from megatron.core.ops.dropout import AttentionDropout
from megatron.core.ops.dropout_masks import MaskWords, kept
from megatron.core.parallel.accelerator import is_accelerator


def tiled_attention(q: Tensor, k: Tensor, v: Tensor, mask: Mask, dropout: AttentionDropout) -> Tensor:
    """`plain_attention` of a causal mask, q and k of one length."""
    assert mask is None and q.shape[2] == k.shape[2], "only causal"
    if (repeat := q.shape[1] // k.shape[1]) > 1:
        k, v = k.repeat_interleave(repeat, dim=1), v.repeat_interleave(repeat, dim=1)
    words = dropout.words_for((*q.shape[:3], k.shape[2]), q.device) if dropout.is_active else (None, None)
    factor = 1 / math.sqrt(q.shape[-1])
    if q.dtype == torch.float16:  # before the product, which would overflow
        q, factor = q * factor, 1.0
    return _Tiled.apply(q, k, v, factor, *words, dropout.probability)


class _Tiled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, factor: float, *dropout: Any) -> Tensor:
        """factor: of scores. dropout: the words of its masks, lines and columns, or None and None; its probability."""
        shape, q = q.shape, by_head(q)
        k, v = by_head(k), by_head(v)
        if dropout[0] is None and not is_accelerator(q.device):
            out, log_sums = (x[0] for x in _FLASH(q[None], k[None], v[None], 0.0, True, scale=factor)[:2])
        else:
            out, log_sums = torch.empty_like(q), wide_empty(q.shape[:2], q)
            for rows, keys in tiles_of(q, _QUERIES, _ELEMENTS):
                products = q[rows] @ k[keys].transpose(1, 2)
                probabilities, log_sums[rows] = _FORWARD(products, factor, *_of_tile(dropout, *rows))
                torch.bmm(probabilities, v[keys], out=out[rows])
        ctx.save_for_backward(q, k, v, out, log_sums, *dropout[:2])
        ctx.factor, ctx.probability = factor, dropout[2]
        return out.view(shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors  # once: recomputation fills it when it is read
        q, k = saved[:2]
        v, out = saved[2:4]
        log_sums, *words = saved[4:]
        shape, grad = grad.shape, by_head(grad)
        inner = (grad.to(log_sums.dtype) * out).sum(dim=-1)  # of each row: sum of probability x its gradient
        grad_q = torch.empty_like(q)
        grad_k, grad_v = (wide_empty(k.shape, k) for _ in range(2))  # wide, since they are sums over tiles
        for rows, keys in reversed([*tiles_of(q, _QUERIES, _ELEMENTS)]):  # the first ones meet all keys
            products = q[rows] @ k[keys].transpose(1, 2), grad[rows] @ v[keys].transpose(1, 2)
            masks = _of_tile((*words, ctx.probability), *rows)
            probabilities, by_scores = _BACKWARD(*products, ctx.factor, log_sums[rows], inner[rows], *masks)
            torch.bmm(by_scores, k[keys], out=grad_q[rows])
            put = Tensor.copy_ if rows[1].stop == q.shape[1] else Tensor.add_
            put(grad_k[keys], by_scores.transpose(1, 2) @ q[rows])
            put(grad_v[keys], probabilities.transpose(1, 2) @ grad[rows])
        return *(x.to(q.dtype).view(shape) for x in (grad_q, grad_k, grad_v)), None, None, None, None


_FLASH = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_QUERIES, _ELEMENTS = 256, 2**20  # of a tile: scores of 2 to 4 MB, beside their probabilities


def _of_tile(dropout: tuple[Any, ...], heads: slice, queries: slice) -> tuple[Any, ...]:
    """The words of the masks of a tile, and the probability."""
    lines, *others = dropout
    if lines is None:
        return None, None, 0.0
    return by_head(lines)[heads, queries], others[0][: queries.stop], others[1]


# ---------------------------------------------------------------- formulas


def _probabilities(scores: Tensor, factor: float, log_sum: Tensor | None = None) -> tuple[Tensor, Tensor]:
    rows, keys = scores.shape[1:]
    later = torch.arange(keys, device=scores.device) > torch.arange(keys - rows, keys, device=scores.device)[:, None]
    wide = (scores.to(torch.promote_types(scores.dtype, torch.float32)) * factor).masked_fill(later, -math.inf)
    if log_sum is None:
        largest = wide.amax(dim=-1)
        log_sum = (wide - largest.unsqueeze(-1)).exp().sum(dim=-1).log() + largest
    return (wide - log_sum.unsqueeze(-1)).exp(), log_sum


def _dropped(x: Tensor, lines: Tensor | None, columns: Tensor | None, probability: float) -> Tensor:
    if lines is None:
        return x
    return torch.where(kept(MaskWords(lines, columns), probability), x * (1 / (1 - probability)), 0)


def _forward(scores: Tensor, factor: float, *dropout: Any) -> tuple[Tensor, Tensor]:
    probabilities, log_sum = _probabilities(scores, factor)
    return _dropped(probabilities, *dropout).to(scores.dtype), log_sum


def _backward(
    scores: Tensor, by_dropped: Tensor, factor: float, log_sum: Tensor, inner: Tensor, *dropout: Any
) -> tuple[Tensor, Tensor]:
    """The dropped probabilities again, and the gradient of the products."""
    probabilities, _ = _probabilities(scores, factor, log_sum)
    by_probabilities = _dropped(by_dropped.to(log_sum.dtype), *dropout)
    by_scores = probabilities * (by_probabilities - inner.unsqueeze(-1)) * factor
    return _dropped(probabilities, *dropout).to(scores.dtype), by_scores.to(scores.dtype)


_FORWARD, _BACKWARD = Compiled(_forward), Compiled(_backward)
