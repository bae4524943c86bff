"""Sliding-window attention by torch's fused kernel, over blocks of the band.

No tensor of s x s is held, forward or backward.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

_ROWS, _ROWS_ON_CPU = 512, 128  # queries of a block: large blocks compute more hidden scores, small ones are more calls


class Block(NamedTuple):
    """Queries [start, stop), and the keys [first, end) that some of them see."""

    start: int
    stop: int
    first: int
    end: int


def blocks_of(queries: int, keys: int, window_left: int, rows: int) -> list[Block]:
    """Return the queries, which are the last of the keys, in blocks of `rows`.

    First those with at most `window_left` keys before them.

                 keys                5 queries, window_left = 2, rows = 2
    query 0      x
          1      x x                 block 0: plain causal attention
          2      x x x
          3      . x x x             block 1: the keys of its queries and `window_left` more; in every such block the
          4      .   x x x           same two triangles are hidden
    """
    earlier_keys = keys - queries  # of a cache
    causal_queries = min(max(window_left + 1 - earlier_keys, 0), queries)
    starts = list(range(causal_queries, queries, rows))
    if causal_queries:
        starts.insert(0, 0)
    stops = [*starts[1:], queries]
    return [
        Block(start, stop, max(0, earlier_keys + start - window_left), earlier_keys + stop)
        for start, stop in zip(starts, stops)
    ]


def attention_in_band(q: Tensor, k: Tensor, v: Tensor, window_left: int, mask: Tensor | None) -> Tensor:
    """Return attention in which each query sees its own key and the `window_left` keys before it.

    Keys that the mask hides are left out.

    q: [b, n, s, d]; k, v: [b, groups, keys, d] -> [b, n, s, d]. The queries are the last of the keys; without a mask
    there are as many of them, or one. The time is that of s x (window_left + rows of a block) scores. The memory is
    that of plain fused attention and, without a mask, of one block's hidden scores; with a mask of every block's.
    """
    queries = q.shape[2]
    keys = k.shape[2]
    rows = _ROWS_ON_CPU if q.device.type == "cpu" else _ROWS
    blocks = blocks_of(queries, keys, window_left, rows)

    # One mask for all blocks after the first, added to scores: a bool mask would be copied for each block, and on
    # accelerators so would rows of an odd length.
    width = window_left + rows
    band_mask = q.new_zeros(rows, width + -width % 16)[:, :width]
    band_mask.masked_fill_(~_visible(rows, width, window_left, q.device), float("-inf"))
    hidden = None if mask is None else mask.expand(*mask.shape[:-2], queries, keys)

    q_blocks = q.split([block.stop - block.start for block in blocks], dim=2)
    key_ranges = [(block.first, block.end) for block in blocks]
    k_blocks = _Ranges.apply(k, key_ranges)
    v_blocks = _Ranges.apply(v, key_ranges)
    outs = []
    for block, q_block, k_block, v_block in zip(blocks, q_blocks, k_blocks, v_blocks):
        start, stop, first, end = block
        size = stop - start
        seen = end - first
        is_causal = hidden is None and size > 1 and start == first == 0
        if hidden is not None:
            attn_mask = _visible(size, seen, window_left, q.device) & ~hidden[..., start:stop, first:end]
        elif is_causal or size == 1:  # one query of a cache sees all the keys of its block
            attn_mask = None
        else:
            attn_mask = band_mask[:size, :seen]
        out = functional.scaled_dot_product_attention(
            q_block, k_block, v_block, attn_mask=attn_mask, is_causal=is_causal, enable_gqa=q.shape[1] != k.shape[1]
        )
        outs.append(out)
    return torch.cat(outs, dim=2)


def _visible(size: int, seen: int, window_left: int, device: torch.device) -> Tensor:
    """Return [size, seen], True for a query's own key and the `window_left` keys before it.

    The queries are the last of the keys.
    """
    return torch.ones(size, seen, dtype=torch.bool, device=device).tril(seen - size).triu(seen - size - window_left)


class _Ranges(torch.autograd.Function):
    """Overlapping ranges of x [b, n, s, d] along s, as views.

    Their gradients meet in one tensor, summed in float32 or wider; the backward of plain slices would make a tensor of
    x's size for each.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, ranges: list[tuple[int, int]]) -> tuple[Tensor, ...]:
        """x: [b, n, s, d]; ranges: (first, end) along s -> a view [b, n, end - first, d] of each."""
        ctx.ranges = ranges  # no tensor is saved: the gradients are added at the same ranges
        ctx.shape = x.shape
        return tuple(x[:, :, first:end] for first, end in ranges)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        """grads: of each range, [b, n, end - first, d] -> the gradient of x [b, n, s, d].

        Saved: the ranges and the shape of x. No tensor is saved, since a slice has the same gradient for any values.
        """
        dtype = grads[0].dtype
        total = grads[0].new_zeros(ctx.shape, dtype=torch.promote_types(dtype, torch.float32))
        for (first, end), grad in zip(ctx.ranges, grads):
            total[:, :, first:end] += grad
        return total.to(dtype), None
