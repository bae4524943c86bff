"""Attention in tiles by torch operations, for any mask, with dropout or without: no scores wait for the backward.

The forward saves q, k, v and the words of dropout's masks. The backward computes a tile's softmax again, by the
operations of
the forward, and its gradient by those of autograd: the numbers are those of `plain_attention` but for the order of sums.
"""

import math
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from megatron.core.ops.attention.masks import Mask, Window, hidden_in_tile
from megatron.core.ops.attention.softcap_and_sinks import Scoring, with_sinks
from megatron.core.ops.attention.tiles import Tile, by_head, tiles_of, wide_empty
from megatron.core.ops.dropout import AttentionDropout
from megatron.core.ops.dropout_masks import MaskWords, clear_dropped, ones_where_kept


def eager_tiled_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Mask, dropout: AttentionDropout, scoring: Scoring | None = None
) -> Tensor:
    """`plain_attention`, q and k of one length."""
    assert q.shape[2] == k.shape[2], "queries without a cache"
    repeat, scores = q.shape[1] // k.shape[1], (*q.shape[:3], k.shape[2])
    k, v = k.repeat_interleave(repeat, dim=1), v.repeat_interleave(repeat, dim=1)
    words = dropout.words_for(scores, q.device) if dropout.is_active else (None, None)
    masks = _Masks(
        mask, scores, dropout.probability if dropout.is_active else 0.0, scoring and scoring._replace(sinks=None)
    )
    sinks = None if scoring is None or scoring.sinks is None else scoring.sinks.repeat(len(q))  # [b n]
    return _EagerTiled.apply(masks, q / math.sqrt(q.shape[-1]), k, v, sinks, *words)


class _EagerTiled(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, masks: "_Masks", q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, *words: Tensor | None
    ) -> Tensor:
        """sinks: [b n] or None. words: of dropout's masks, lines [b, n, s, 2] and columns [s], or None and None."""
        shape = q.shape
        q, k = by_head(q), by_head(k)
        v, out = by_head(v), torch.empty_like(q)
        for tile in masks.tiles(q):
            whole = masks.softmax(q[tile.rows] @ k[tile.columns].transpose(1, 2), tile, sinks)
            probabilities = masks.of_keys(whole, tile)
            masks.drop(masks.ones(*words, tile), probabilities)
            torch.bmm(probabilities.to(q.dtype), v[tile.columns], out=out[tile.rows])
        ctx.save_for_backward(q, k, v, sinks, *words)
        ctx.masks = masks
        return out.view(shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        saved, masks = ctx.saved_tensors, ctx.masks  # once: recomputation fills it when it is read
        q, k = saved[:2]
        v, sinks = saved[2:4]
        words = saved[4:]
        grad_sinks = None if sinks is None else wide_empty(sinks.shape, sinks).zero_()
        shape, grad = grad.shape, by_head(grad)
        grad_q, grad_k = torch.empty_like(q), wide_empty(k.shape, k).zero_()
        grad_v = torch.zeros_like(grad_k)  # wide, since it is a sum over tiles
        for tile in masks.tiles(q):
            rows, columns = tile
            slope = None
            if masks.scoring is not None:
                slope = masks.scoring.slope((q[rows] @ k[columns].transpose(1, 2)).to(grad_k.dtype))
            whole = masks.softmax(q[rows] @ k[columns].transpose(1, 2), tile, sinks)  # nobody else holds the scores
            probabilities = masks.of_keys(whole, tile)
            by_probabilities = (grad[rows] @ v[columns].transpose(1, 2)).to(probabilities.dtype)
            ones = masks.ones(*words, tile)
            masks.drop(ones, by_probabilities)
            if sinks is None:
                by_scores = _of_softmax(by_probabilities, probabilities)
            else:
                by_whole = _of_softmax(functional.pad(by_probabilities, (0, 1)), whole)
                grad_sinks[rows[0]] += by_whole[..., -1].sum(dim=-1)
                by_scores = masks.of_keys(by_whole, tile)
            by_scores = (by_scores if slope is None else by_scores * slope).to(q.dtype)
            masks.drop(ones, probabilities)
            torch.bmm(by_scores, k[columns], out=grad_q[rows])
            grad_k[columns] += by_scores.transpose(1, 2) @ q[rows]
            grad_v[columns] += probabilities.to(q.dtype).transpose(1, 2) @ grad[rows]
        of_heads = (x.to(q.dtype).view(shape) for x in (grad_q, grad_k, grad_v))
        return None, *of_heads, None if sinks is None else grad_sinks.to(sinks.dtype), None, None


class _Masks(NamedTuple):
    """What is hidden and dropped of all scores, tile by tile."""

    mask: Mask
    scores: tuple[int, ...]  # their shape, [b, n, s, s]
    probability: float  # of dropout
    scoring: Scoring | None = None  # its sinks are given apart

    def tiles(self, q: Tensor) -> Iterable[Tile]:
        elements = _ELEMENTS_PER_THREAD * torch.get_num_threads() if q.device.type == "cpu" else _ELEMENTS_ELSEWHERE
        before = self.mask.before if isinstance(self.mask, Window) else None
        return tiles_of(q, _QUERIES, elements, is_causal=not isinstance(self.mask, Tensor), before=before)

    def softmax(self, scores: Tensor, tile: Tile, sinks: Tensor | None) -> Tensor:
        """Of the tile's scores [heads, queries, keys], which it may overwrite, in float32 or wider; sinks are a last key."""
        wide = scores.to(torch.promote_types(scores.dtype, torch.float32))
        wide = wide if self.scoring is None else self.scoring.capped(wide)
        if self.mask is None:  # only the last keys, of the queries themselves, may be later than a query
            last = wide[..., -wide.shape[1] :]
            last.masked_fill_(torch.ones_like(last[0], dtype=torch.bool).triu(1), -math.inf)
        else:
            wide.masked_fill_(hidden_in_tile(self.mask, tile, self.scores, scores.device), -math.inf)
        return (wide if sinks is None else with_sinks(wide, sinks[tile.rows[0], None, None])).softmax(dim=-1)

    def of_keys(self, whole: Tensor, tile: Tile) -> Tensor:
        """Without the sinks."""
        return whole[..., : tile.columns[1].stop - tile.columns[1].start]

    def ones(self, lines: Tensor | None, columns: Tensor | None, tile: Tile) -> Tensor | None:
        """1 where a number of the tile is kept, 0 elsewhere; None: all are kept."""
        if lines is None:
            return None
        return ones_where_kept(MaskWords(by_head(lines)[tile.rows], columns[tile.columns[1]]), self.probability)

    def drop(self, ones: Tensor | None, x: Tensor) -> None:
        if ones is not None:
            clear_dropped(x, ones)
            x *= 1 / (1 - self.probability)


def _of_softmax(grad: Tensor, probabilities: Tensor) -> Tensor:
    """The gradient of a softmax's input, by the kernel of autograd: exactly 0 where one probability is 1."""
    return torch._softmax_backward_data(grad, probabilities, -1, grad.dtype)


_QUERIES = 128
_ELEMENTS_PER_THREAD = 2**18  # scores of 1 MB, beside three as large
_ELEMENTS_ELSEWHERE = 2**24  # keeps a large device busy
