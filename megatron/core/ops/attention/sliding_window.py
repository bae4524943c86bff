"""Attention in a window by torch's fused kernel, over blocks of the band: no tensor of s x s is held. Forward and
backward."""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

_ROWS, _ROWS_ON_CPU = 512, 128  # queries of a block: large blocks compute more hidden scores, small ones are more calls


class Block(NamedTuple):
    """Queries [start, stop), and the keys [first, end) that they see together."""

    start: int
    stop: int
    first: int
    end: int


def blocks_of(queries: int, keys: int, before: int, rows: int) -> list[Block]:
    """The queries, which are the last of the keys, in blocks of `rows`. First those with at most `before` keys before them.

                 keys                5 queries, before = 2, rows = 2
    query 0      x
          1      x x                 block 0: plain causal attention
          2      x x x
          3      . x x x             block 1: the keys of its queries and `before` more; in every such block the
          4      .   x x x           same two triangles are hidden
    """
    earlier = keys - queries
    plain = min(max(before + 1 - earlier, 0), queries)
    starts = [*([0] if plain else []), *range(plain, queries, rows)]
    return [Block(a, b, max(0, earlier + a - before), earlier + b) for a, b in zip(starts, [*starts[1:], queries])]


def attention_in_band(q: Tensor, k: Tensor, v: Tensor, before: int, mask: Tensor | None) -> Tensor:
    """Each query sees its own key and the `before` ones before it, less those that the mask hides.

    q: [b, n, s, d]; k, v: [b, groups, keys, d] -> [b, n, s, d]. The queries are the last of the keys; without a mask there
    are as many of them, or one. The time is that of s x (before + rows of a block) scores. The memory is that of plain fused
    attention and, without a mask, of one block's hidden scores; with a mask of every block's.
    """
    queries, keys = q.shape[2], k.shape[2]
    rows = _ROWS_ON_CPU if q.device.type == "cpu" else _ROWS
    blocks = blocks_of(queries, keys, before, rows)
    width = before + rows
    # Added to scores; a bool mask would be copied for each block, and on accelerators so would rows of an odd length.
    shared = q.new_zeros(rows, width + -width % 16)[:, :width]
    shared.masked_fill_(~_visible(rows, width, before, q.device), float("-inf"))
    masked = None if mask is None else mask.expand(*mask.shape[:-2], queries, keys)
    pieces = q.split([stop - start for start, stop, *_ in blocks], dim=2)
    ranges, parts = [(first, end) for *_, first, end in blocks], []
    for (start, stop, first, end), *heads in zip(blocks, pieces, _Ranges.apply(k, ranges), _Ranges.apply(v, ranges)):
        size, seen = stop - start, end - first
        is_causal = masked is None and size > 1 and start == first == 0
        if masked is not None:
            allowed = _visible(size, seen, before, q.device) & ~masked[..., start:stop, first:end]
        else:
            allowed = None if is_causal or size == 1 else shared[:size, :seen]
        parts.append(
            functional.scaled_dot_product_attention(
                *heads, attn_mask=allowed, is_causal=is_causal, enable_gqa=q.shape[1] != k.shape[1]
            )
        )
    return torch.cat(parts, dim=2)


def _visible(size: int, seen: int, before: int, device: torch.device) -> Tensor:
    """[size, seen], True for a query's own key and the `before` ones before it; the queries are the last of the keys."""
    return torch.ones(size, seen, dtype=torch.bool, device=device).tril(seen - size).triu(seen - size - before)


class _Ranges(torch.autograd.Function):
    """Overlapping ranges of x [b, n, s, d] along s, as views. Their gradients meet in one tensor, summed in float32 or
    wider;
    the backward of plain slices would make a tensor of x's size for each."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ranges: list[tuple[int, int]]) -> tuple[Tensor, ...]:
        ctx.ranges, ctx.shape = ranges, x.shape
        return tuple(x[:, :, first:end] for first, end in ranges)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        dtype = grads[0].dtype
        total = grads[0].new_zeros(ctx.shape, dtype=torch.promote_types(dtype, torch.float32))
        for (first, end), grad in zip(ctx.ranges, grads):
            total[:, :, first:end] += grad
        return total.to(dtype), None
