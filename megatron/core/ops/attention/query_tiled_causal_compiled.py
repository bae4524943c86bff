"""Causal attention in tiles of queries, compiled, with dropout or without: no s x s tensor.

As in FlashAttention-2 (arXiv:2307.08691, algorithms 1 and 2) the forward saves q, k, v, its result and log(sum exp) of
each row, and the backward computes the scores again. Without dropout a CPU runs torch's forward, which saves the same.
"""

import math
from typing import Any

import torch
from torch import Tensor

from megatron.core.ops.attention.document_and_window_masks import Mask
from megatron.core.ops.attention.query_tiles import flatten_batch_and_heads, tiles_of, wide_empty
from megatron.core.ops.compile.compiled_region import Compiled
from megatron.core.ops.dropout_masks import MaskWords, keep_mask
from megatron.core.ops.layout_invariant_dropout import AttentionDropout
from megatron.core.parallel.accelerator import is_accelerator


def tiled_causal_attention(q: Tensor, k: Tensor, v: Tensor, mask: Mask, dropout: AttentionDropout) -> Tensor:
    """`unfused_attention` of q [b, n, s, d] and k, v [b, groups, s, d] under a causal mask -> [b, n, s, d].

    Asserts that there is no other mask and that there are as many queries as keys.
    """
    assert mask is None and q.shape[2] == k.shape[2], "only causal"
    queries_per_group = q.shape[1] // k.shape[1]
    if queries_per_group > 1:
        k = k.repeat_interleave(queries_per_group, dim=1)  # [b, n, s, d]
        v = v.repeat_interleave(queries_per_group, dim=1)
    words = (None, None)  # of no dropout
    if dropout.is_active:
        words = dropout.words_for((*q.shape[:3], k.shape[2]), q.device)
    scale = 1 / math.sqrt(q.shape[-1])
    if q.dtype == torch.float16:  # before the product, which would overflow
        q = q * scale
        scale = 1.0
    return _Tiled.apply(q, k, v, scale, *words, dropout.probability)


class _Tiled(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        scale: float,
        lines: Tensor | None,
        columns: Tensor | None,
        probability: float,
    ) -> Tensor:
        """q, k, v: [b, n, s, d] -> [b, n, s, d]. scale: of scores.

        lines [b, n, s, 2], columns [s]: the words of dropout's masks, or None and None.
        """
        shape = q.shape
        q = flatten_batch_and_heads(q)  # [b n, s, d]
        k = flatten_batch_and_heads(k)
        v = flatten_batch_and_heads(v)
        if lines is None and not is_accelerator(q.device):
            out, log_sums, *_ = _FLASH(q[None], k[None], v[None], 0.0, True, scale=scale)
            out = out[0]  # [b n, s, d]
            log_sums = log_sums[0]  # [b n, s]
        else:
            out = torch.empty_like(q)
            log_sums = wide_empty(q.shape[:2], q)
            for rows, keys in tiles_of(q, _QUERIES, _ELEMENTS):
                raw_scores = q[rows] @ k[keys].transpose(1, 2)  # [heads, queries, keys] of the tile
                words = _words_of_tile(lines, columns, probability, rows)
                probabilities, log_sums[rows] = _FORWARD(raw_scores, scale, *words)
                torch.bmm(probabilities, v[keys], out=out[rows])
        ctx.save_for_backward(q, k, v, out, log_sums, lines, columns)
        ctx.scale = scale
        ctx.probability = probability
        return out.view(shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """grad: [b, n, s, d] -> the gradients of q, k and v, [b, n, s, d] each.

        Saved: q, k, v [b n, s, d], of which the scores of a tile are computed again; the result [b n, s, d] and log(sum
        exp) of each row [b n, s], with which a tile's probabilities and its softmax's gradient need no other tile; the
        words of dropout's masks, which are drawn again.
        """
        # Read once: under recomputation, reading saved_tensors recomputes them.
        q, k, v, out, log_sums, lines, columns = ctx.saved_tensors
        shape = grad.shape
        grad = flatten_batch_and_heads(grad)  # [b n, s, d]
        inner = (grad.to(log_sums.dtype) * out).sum(dim=-1)  # [b n, s], of each row: sum of probability x its gradient
        grad_q = torch.empty_like(q)
        # float32 or wider, since they are sums over tiles
        grad_k = wide_empty(k.shape, k)
        grad_v = wide_empty(k.shape, k)
        # From the last tile of queries, which sees all keys: it writes the sums, the others add to them.
        for rows, keys in reversed([*tiles_of(q, _QUERIES, _ELEMENTS)]):
            raw_scores = q[rows] @ k[keys].transpose(1, 2)  # [heads, queries, keys] of the tile
            grad_dropped = grad[rows] @ v[keys].transpose(1, 2)  # of the probabilities after dropout
            words = _words_of_tile(lines, columns, ctx.probability, rows)
            probabilities, grad_scores = _BACKWARD(
                raw_scores, grad_dropped, ctx.scale, log_sums[rows], inner[rows], *words
            )
            torch.bmm(grad_scores, k[keys], out=grad_q[rows])
            is_last_of_rows = rows[1].stop == q.shape[1]
            accumulate = Tensor.copy_ if is_last_of_rows else Tensor.add_
            accumulate(grad_k[keys], grad_scores.transpose(1, 2) @ q[rows])
            accumulate(grad_v[keys], probabilities.transpose(1, 2) @ grad[rows])
        grads_qkv = [x.to(q.dtype).view(shape) for x in (grad_q, grad_k, grad_v)]
        return *grads_qkv, None, None, None, None


_FLASH = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_QUERIES, _ELEMENTS = 256, 2**20  # of a tile: scores of 2 to 4 MB, beside their probabilities


def _words_of_tile(
    lines: Tensor | None, columns: Tensor | None, probability: float, rows: tuple[slice, slice]
) -> tuple[Tensor | None, Tensor | None, float]:
    """Return the words of the dropout masks of a tile, and the probability. rows: its heads and queries."""
    if lines is None:
        return None, None, 0.0
    heads, queries = rows
    return flatten_batch_and_heads(lines)[heads, queries], columns[: queries.stop], probability


# ---------------------------------------------------------------- formulas, compiled


def _probabilities(raw_scores: Tensor, scale: float, log_sum: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return (probabilities [heads, queries, keys], log(sum exp) [heads, queries]). log_sum: if it is known."""
    rows, keys = raw_scores.shape[1:]
    key = torch.arange(keys, device=raw_scores.device)
    query = torch.arange(keys - rows, keys, device=raw_scores.device)[:, None]
    is_later = key > query
    scores = raw_scores.to(torch.promote_types(raw_scores.dtype, torch.float32)) * scale
    scores = scores.masked_fill(is_later, -math.inf)
    if log_sum is None:
        largest = scores.amax(dim=-1)
        log_sum = (scores - largest.unsqueeze(-1)).exp().sum(dim=-1).log() + largest
    return (scores - log_sum.unsqueeze(-1)).exp(), log_sum


def _dropped(x: Tensor, lines: Tensor | None, columns: Tensor | None, probability: float) -> Tensor:
    if lines is None:
        return x
    return torch.where(keep_mask(MaskWords(lines, columns), probability), x * (1 / (1 - probability)), 0)


def _forward(raw_scores: Tensor, scale: float, *dropout: Any) -> tuple[Tensor, Tensor]:
    probabilities, log_sum = _probabilities(raw_scores, scale)
    return _dropped(probabilities, *dropout).to(raw_scores.dtype), log_sum


def _backward(
    raw_scores: Tensor, grad_dropped: Tensor, scale: float, log_sum: Tensor, inner: Tensor, *dropout: Any
) -> tuple[Tensor, Tensor]:
    """Return the dropped probabilities again, and the gradient of the raw scores."""
    probabilities, _ = _probabilities(raw_scores, scale, log_sum)
    grad_probabilities = _dropped(grad_dropped.to(log_sum.dtype), *dropout)
    grad_scores = probabilities * (grad_probabilities - inner.unsqueeze(-1)) * scale
    return _dropped(probabilities, *dropout).to(raw_scores.dtype), grad_scores.to(raw_scores.dtype)


_FORWARD, _BACKWARD = Compiled(_forward), Compiled(_backward)
