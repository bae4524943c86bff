"""Attention in tiles by torch operations, for any mask, with dropout or without: no scores are saved for the backward.

The forward saves q, k, v and the words of dropout's masks. The backward computes a tile's softmax again, by the
operations of the forward, and its gradient by those of autograd: the numbers are those of `unfused_attention` but for
the order of sums.
"""

import math
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from megatron.core.ops.attention.document_and_window_masks import Mask, Window, hidden_in_tile
from megatron.core.ops.attention.query_tiles import Tile, flatten_batch_and_heads, tiles_of, wide_empty
from megatron.core.ops.attention.softcap_and_sinks import SoftmaxOptions, with_sinks
from megatron.core.ops.dropout_masks import MaskWords, clear_dropped, ones_where_kept
from megatron.core.ops.layout_invariant_dropout import AttentionDropout


def eager_tiled_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Mask, dropout: AttentionDropout, options: SoftmaxOptions | None = None
) -> Tensor:
    """`unfused_attention` of q [b, n, s, d] and k, v [b, groups, s, d] -> [b, n, s, d].

    As many queries as keys: a cache is not supported (AssertionError).
    """
    assert q.shape[2] == k.shape[2], "queries without a cache"
    queries_per_group = q.shape[1] // k.shape[1]
    scores_shape = (*q.shape[:3], k.shape[2])
    k = k.repeat_interleave(queries_per_group, dim=1)  # [b, n, s, d]
    v = v.repeat_interleave(queries_per_group, dim=1)
    words = (None, None)  # of no dropout
    probability = 0.0
    if dropout.is_active:
        words = dropout.words_for(scores_shape, q.device)
        probability = dropout.probability
    sinks = None
    options_of_tiles = None
    if options is not None:
        options_of_tiles = options._replace(sinks=None)
        if options.sinks is not None:
            sinks = options.sinks.repeat(len(q))  # [b n]
    tile_softmax = _TileSoftmax(mask, scores_shape, probability, options_of_tiles)
    return _EagerTiled.apply(tile_softmax, q / math.sqrt(q.shape[-1]), k, v, sinks, *words)


class _EagerTiled(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        tile_softmax: "_TileSoftmax",
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
        *words: Tensor | None,
    ) -> Tensor:
        """q (scaled), k, v: [b, n, s, d] -> [b, n, s, d].

        sinks: [b n] or None. words: of dropout's masks, lines [b, n, s, 2] and columns [s], or None and None.
        """
        shape = q.shape
        q = flatten_batch_and_heads(q)  # [b n, s, d]
        k = flatten_batch_and_heads(k)
        v = flatten_batch_and_heads(v)
        out = torch.empty_like(q)
        for tile in tile_softmax.tiles(q):
            # In one expression: nobody else may have the scores, which the softmax overwrites.
            with_sink = tile_softmax.softmax(q[tile.rows] @ k[tile.columns].transpose(1, 2), tile, sinks)
            probabilities = tile_softmax.of_keys(with_sink, tile)  # [heads, queries, keys] of the tile
            tile_softmax.drop(tile_softmax.dropout_ones(*words, tile), probabilities)
            torch.bmm(probabilities.to(q.dtype), v[tile.columns], out=out[tile.rows])
        ctx.save_for_backward(q, k, v, sinks, *words)
        ctx.tile_softmax = tile_softmax
        return out.view(shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """grad: [b, n, s, d] -> the gradients of q, k, v [b, n, s, d] each, and of the sinks [b n].

        Saved: q, k, v and the sinks, of which each tile computes its probabilities again: all scores would take s x s
        numbers for each head. The words of dropout's masks, which are drawn again.
        """
        # Read once: under recomputation, reading saved_tensors recomputes them.
        q, k, v, sinks, *words = ctx.saved_tensors
        tile_softmax = ctx.tile_softmax
        shape = grad.shape
        grad_sinks = None if sinks is None else wide_empty(sinks.shape, sinks).zero_()  # [b n]
        grad = flatten_batch_and_heads(grad)  # [b n, s, d]
        grad_q = torch.empty_like(q)
        # float32 or wider, since they are sums over tiles
        grad_k = wide_empty(k.shape, k).zero_()
        grad_v = torch.zeros_like(grad_k)
        for tile in tile_softmax.tiles(q):
            rows, columns = tile

            # probabilities again; the derivative of a soft cap, from scores of their own: the softmax overwrites its input
            slope = None
            if tile_softmax.options is not None:
                slope = tile_softmax.options.slope((q[rows] @ k[columns].transpose(1, 2)).to(grad_k.dtype))
            with_sink = tile_softmax.softmax(q[rows] @ k[columns].transpose(1, 2), tile, sinks)
            probabilities = tile_softmax.of_keys(with_sink, tile)  # [heads, queries, keys]

            # through dropout and the softmax, to the scores and the sinks
            grad_probabilities = (grad[rows] @ v[columns].transpose(1, 2)).to(probabilities.dtype)
            ones = tile_softmax.dropout_ones(*words, tile)
            tile_softmax.drop(ones, grad_probabilities)
            if sinks is None:
                grad_scores = _softmax_backward(grad_probabilities, probabilities)
            else:
                # A sink has no value: its probability has a gradient of 0.
                grad_with_sink = _softmax_backward(functional.pad(grad_probabilities, (0, 1)), with_sink)
                grad_sinks[rows[0]] += grad_with_sink[..., -1].sum(dim=-1)
                grad_scores = tile_softmax.of_keys(grad_with_sink, tile)
            if slope is not None:
                grad_scores = grad_scores * slope
            grad_scores = grad_scores.to(q.dtype)

            # to q, k and v
            tile_softmax.drop(ones, probabilities)
            torch.bmm(grad_scores, k[columns], out=grad_q[rows])
            grad_k[columns] += grad_scores.transpose(1, 2) @ q[rows]
            grad_v[columns] += probabilities.to(q.dtype).transpose(1, 2) @ grad[rows]
        grads_qkv = [x.to(q.dtype).view(shape) for x in (grad_q, grad_k, grad_v)]
        return None, *grads_qkv, None if sinks is None else grad_sinks.to(sinks.dtype), None, None


class _TileSoftmax(NamedTuple):
    """The softmax of a tile's scores, with mask, soft cap, sinks and dropout."""

    mask: Mask
    scores_shape: tuple[int, ...]  # of all scores, [b, n, s, s]
    probability: float  # of dropout
    options: SoftmaxOptions | None = None  # without sinks, which need a gradient and are an argument

    def tiles(self, q: Tensor) -> Iterable[Tile]:
        """Return the tiles of the scores of q [b n, s, d]."""
        elements = _ELEMENTS_PER_THREAD * torch.get_num_threads() if q.device.type == "cpu" else _ELEMENTS_ELSEWHERE
        is_causal = not isinstance(self.mask, Tensor)
        window_left = self.mask.left if isinstance(self.mask, Window) else None
        return tiles_of(q, _QUERIES, elements, is_causal=is_causal, window_left=window_left)

    def softmax(self, scores: Tensor, tile: Tile, sinks: Tensor | None) -> Tensor:
        """Return the probabilities of the tile's scores, in float32 or wider; may overwrite the scores.

        scores: [heads, queries, keys] -> [heads, queries, keys]; with sinks [b n] -> [heads, queries, keys + 1], the
        sink as the last key.
        """
        wide = scores.to(torch.promote_types(scores.dtype, torch.float32))
        if self.options is not None:
            wide = self.options.softcap(wide)
        if self.mask is None:  # only the last keys, those of the queries themselves, may be later than a query
            last = wide[..., -wide.shape[1] :]
            last.masked_fill_(torch.ones_like(last[0], dtype=torch.bool).triu(1), -math.inf)
        else:
            wide.masked_fill_(hidden_in_tile(self.mask, tile, self.scores_shape, scores.device), -math.inf)
        if sinks is not None:
            wide = with_sinks(wide, sinks[tile.rows[0], None, None])
        return wide.softmax(dim=-1)

    def of_keys(self, with_sink: Tensor, tile: Tile) -> Tensor:
        """Return the columns of the keys, without that of the sinks.

        with_sink: [heads, queries, keys or keys + 1] -> [heads, queries, keys]
        """
        return with_sink[..., : tile.columns[1].stop - tile.columns[1].start]

    def dropout_ones(self, lines: Tensor | None, columns: Tensor | None, tile: Tile) -> Tensor | None:
        """Return 1 where a number of the tile is kept, 0 elsewhere: int32 [heads, queries, keys]; None: all are kept.

        lines: [b, n, s, 2], columns: [s], or None and None without dropout.
        """
        if lines is None:
            return None
        return ones_where_kept(
            MaskWords(flatten_batch_and_heads(lines)[tile.rows], columns[tile.columns[1]]), self.probability
        )

    def drop(self, ones: Tensor | None, x: Tensor) -> None:
        """Set dropped numbers of x [heads, queries, keys] to 0 and multiply the others by 1 / (1 - p), in place.

        ones: of `dropout_ones`, int32 [heads, queries, keys]; None: x stays as it is.
        """
        if ones is not None:
            clear_dropped(x, ones)
            x *= 1 / (1 - self.probability)


def _softmax_backward(grad: Tensor, probabilities: Tensor) -> Tensor:
    """Return the gradient of a softmax's input, by the kernel of autograd: exactly 0 where one probability is 1."""
    return torch._softmax_backward_data(grad, probabilities, -1, grad.dtype)


_QUERIES = 128
_ELEMENTS_PER_THREAD = 2**18  # scores of 1 MB, beside three as large
_ELEMENTS_ELSEWHERE = 2**24  # keeps a large device busy
