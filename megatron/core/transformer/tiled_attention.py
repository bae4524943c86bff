"""Causal attention in tiles of queries, compiled or eager, with dropout or without: no s x s tensor.

    keys        0   1   2   3           a tile of queries meets the keys up to its own last: 10 of 16 tiles of scores here;
    queries 0   x                       its scores stay in the cache between the product that makes them and the product
            1   x   x                   that reads them
            2   x   x   x
            3   x   x   x   x

As in FlashAttention-2 (arXiv:2307.08691, algorithms 1 and 2) the forward saves q, k, v, its result and log(sum exp) of each
row, and the backward computes the scores again. A tile holds all of its keys, so its softmax needs no rescaling.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron.core.compiler import Compiled, Formula
from megatron.core.dropout_masks import MaskWords, clear_dropped, kept, ones_where_kept
from megatron.core.random import AttentionDropout
from megatron.core.transformer.masks import Mask, hidden_keys


class Formulas(NamedTuple):
    """What is computed of a tile of scores, and its size; the formulas may overwrite the products that they get."""

    forward: Formula
    backward: Formula
    queries: int
    elements: int
    elsewhere: int  # elements on other devices than a CPU


def tiled_attention(q: Tensor, k: Tensor, v: Tensor, mask: Mask, dropout: AttentionDropout) -> Tensor:
    """`plain_attention` of a causal mask, q and k of one length, compiled."""
    assert mask is None and q.shape[2] == k.shape[2], "only causal"
    return _by_tiles(_COMPILED, q, k, v, None, dropout)


def eager_tiled_attention(q: Tensor, k: Tensor, v: Tensor, mask: Mask, dropout: AttentionDropout) -> Tensor:
    """`plain_attention`, q and k of one length."""
    assert q.shape[2] == k.shape[2], "queries without a cache"
    return _by_tiles(_EAGER, q, k, v, mask, dropout)


def _by_tiles(formulas: Formulas, q: Tensor, k: Tensor, v: Tensor, mask: Mask, dropout: AttentionDropout) -> Tensor:
    repeat, scores = q.shape[1] // k.shape[1], (*q.shape[:3], k.shape[2])
    k, v = k.repeat_interleave(repeat, dim=1), v.repeat_interleave(repeat, dim=1)
    words = dropout.words_for(scores, q.device) if dropout.is_active else (None, None)
    hidden = None if mask is None else hidden_keys(mask, *scores[2:], q.device).expand(scores)
    tiles = _Tiles(formulas, not isinstance(mask, Tensor), dropout.probability)
    return _Tiled.apply(tiles, q / math.sqrt(q.shape[-1]), k, v, hidden, *words)


@dataclass(frozen=True)
class _Tiles:
    formulas: Formulas
    is_causal: bool  # a query meets no later key, whatever else is hidden
    probability: float

    def of(self, q: Tensor) -> Iterator[tuple[tuple[slice, slice], tuple[slice, slice]]]:
        """(heads, queries) and (heads, keys) of each tile, for q [b n, s, d]."""
        heads, length = q.shape[:2]
        elements = self.formulas.elements if q.device.type == "cpu" else self.formulas.elsewhere
        for start in range(0, length, self.formulas.queries):
            stop = min(start + self.formulas.queries, length)
            keys = stop if self.is_causal else length
            at_once = max(1, elements // (self.formulas.queries * keys))
            for first in range(0, heads, at_once):
                some = slice(first, min(first + at_once, heads))
                yield (some, slice(start, stop)), (some, slice(keys))

    def masks(
        self,
        rows: tuple[slice, slice],
        keys: tuple[slice, slice],
        hidden: Tensor | None,
        lines: Tensor | None,
        columns: Tensor | None,
    ) -> tuple[Any, ...]:
        """Of a tile: what is hidden, if it is not what is later; the words of what is dropped, and the probability."""
        shown = ()
        if hidden is not None:
            heads = torch.arange(rows[0].start, rows[0].stop, device=hidden.device)
            of_heads = heads // hidden.shape[1], heads % hidden.shape[1]
            shown = (hidden[of_heads[0], of_heads[1], rows[1], keys[1]],)
        if lines is None:
            return None, None, 0.0, *shown
        return _by_head(lines)[rows], columns[keys[1]], self.probability, *shown


class _Tiled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tiles: _Tiles, q: Tensor, k: Tensor, v: Tensor, *of_masks: Tensor | None) -> Tensor:
        """of_masks: hidden keys [b, n, s, s]; the words of dropout's masks, lines and columns. Or None."""
        q, k = _by_head(q), _by_head(k)
        of_heads, out = _by_head(v), torch.empty_like(q)
        log_sums = _wide_empty(q.shape[:2], q)
        for rows, keys in tiles.of(q):
            masks = tiles.masks(rows, keys, *of_masks)
            probabilities, log_sums[rows] = tiles.formulas.forward(q[rows] @ k[keys].transpose(1, 2), *masks)
            torch.bmm(probabilities, of_heads[keys], out=out[rows])
        ctx.save_for_backward(q, k, of_heads, out, log_sums, *of_masks)
        ctx.tiles = tiles
        return out.view_as(v)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors  # once: recomputation fills it when it is read
        q, k = saved[:2]
        v, out = saved[2:4]
        log_sums, *of_masks = saved[4:]
        shape, grad = grad.shape, _by_head(grad)
        inner = (grad.to(log_sums.dtype) * out).sum(dim=-1)  # of each row: sum of probability x its gradient
        grad_q, grad_k = torch.empty_like(q), _wide_empty(k.shape, k).zero_()
        grad_v = torch.zeros_like(grad_k)  # wide, since it is a sum over tiles
        for rows, keys in ctx.tiles.of(q):
            products = q[rows] @ k[keys].transpose(1, 2), grad[rows] @ v[keys].transpose(1, 2)
            masks = ctx.tiles.masks(rows, keys, *of_masks)
            probabilities, by_scores = ctx.tiles.formulas.backward(*products, log_sums[rows], inner[rows], *masks)
            torch.bmm(by_scores, k[keys], out=grad_q[rows])
            grad_k[keys] += by_scores.transpose(1, 2) @ q[rows]
            grad_v[keys] += probabilities.transpose(1, 2) @ grad[rows]
        return None, *(x.to(q.dtype).view(shape) for x in (grad_q, grad_k, grad_v)), None, None, None


def _by_head(x: Tensor) -> Tensor:
    """[b, n, ...] -> [b n, ...]"""
    return x.reshape(-1, *x.shape[2:])


def _wide_empty(shape: tuple[int, ...], like: Tensor) -> Tensor:
    return torch.empty(shape, dtype=torch.promote_types(like.dtype, torch.float32), device=like.device)


# ---------------------------------------------------------------- formulas


def _probabilities(scores: Tensor, log_sum: Tensor | None = None) -> tuple[Tensor, Tensor]:
    rows, keys = scores.shape[1:]
    later = torch.arange(keys, device=scores.device) > torch.arange(keys - rows, keys, device=scores.device)[:, None]
    wide = scores.to(torch.promote_types(scores.dtype, torch.float32)).masked_fill(later, -math.inf)
    if log_sum is None:
        largest = wide.amax(dim=-1)
        log_sum = (wide - largest.unsqueeze(-1)).exp().sum(dim=-1).log() + largest
    return (wide - log_sum.unsqueeze(-1)).exp(), log_sum


def _dropped(x: Tensor, lines: Tensor | None, columns: Tensor | None, probability: float) -> Tensor:
    if lines is None:
        return x
    return torch.where(kept(MaskWords(lines, columns), probability), x * (1 / (1 - probability)), 0)


def _forward(scores: Tensor, *dropout: Any) -> tuple[Tensor, Tensor]:
    probabilities, log_sum = _probabilities(scores)
    return _dropped(probabilities, *dropout).to(scores.dtype), log_sum


def _backward(
    scores: Tensor, by_dropped: Tensor, log_sum: Tensor, inner: Tensor, *dropout: Any
) -> tuple[Tensor, Tensor]:
    """The dropped probabilities again, and the gradient of the scores."""
    probabilities, _ = _probabilities(scores, log_sum)
    by_probabilities = _dropped(by_dropped.to(log_sum.dtype), *dropout)
    by_scores = probabilities * (by_probabilities - inner.unsqueeze(-1))
    return _dropped(probabilities, *dropout).to(scores.dtype), by_scores.to(scores.dtype)


def _softmax_in_place(scores: Tensor, log_sum: Tensor | None, hidden: Tensor | None) -> tuple[Tensor, Tensor]:
    """`_probabilities`, of which hidden keys have none: without `hidden` those later than the query."""
    rows, keys = scores.shape[1:]
    wide = scores.to(torch.promote_types(scores.dtype, torch.float32))
    if hidden is not None:
        wide.masked_fill_(hidden, -math.inf)
    else:
        wide[..., keys - rows :] += wide.new_full((rows, rows), -math.inf).triu(1)
    if log_sum is not None:
        wide -= log_sum.unsqueeze(-1)
        return wide.exp_(), log_sum
    largest = wide.amax(dim=-1, keepdim=True)
    wide -= largest
    total = wide.exp_().sum(dim=-1, keepdim=True)
    wide /= total
    return wide, (total.log() + largest).squeeze(-1)


def _drop_in_place(x: Tensor, kept_ones: Tensor | None, probability: float) -> None:
    if kept_ones is not None:
        clear_dropped(x, kept_ones)
        x *= 1 / (1 - probability)


def _ones(lines: Tensor | None, columns: Tensor | None, probability: float) -> Tensor | None:
    return None if lines is None else ones_where_kept(MaskWords(lines, columns), probability)


def _eager_forward(
    scores: Tensor, lines: Tensor | None, columns: Tensor | None, probability: float, hidden: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    probabilities, log_sum = _softmax_in_place(scores, None, hidden)
    _drop_in_place(probabilities, _ones(lines, columns, probability), probability)
    return probabilities.to(scores.dtype), log_sum


def _eager_backward(
    scores: Tensor, by_dropped: Tensor, log_sum: Tensor, inner: Tensor, *masks: Any
) -> tuple[Tensor, Tensor]:
    words, hidden = masks[:3], masks[3] if len(masks) > 3 else None
    probabilities, _ = _softmax_in_place(scores, log_sum, hidden)
    by_scores, kept_ones = by_dropped.to(log_sum.dtype), _ones(*words)
    _drop_in_place(by_scores, kept_ones, words[2])
    by_scores -= inner.unsqueeze(-1)
    by_scores *= probabilities
    _drop_in_place(probabilities, kept_ones, words[2])
    return probabilities.to(scores.dtype), by_scores.to(scores.dtype)


# Scores of a tile: 2 to 4 MB compiled, beside their probabilities; 1 MB eager, beside three as large. Larger tiles are fewer kernels.
_COMPILED = Formulas(Compiled(_forward), Compiled(_backward), queries=256, elements=2**20, elsewhere=2**20)
_EAGER = Formulas(_eager_forward, _eager_backward, queries=128, elements=2**18, elsewhere=2**24)
