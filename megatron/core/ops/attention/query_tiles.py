"""Tiles of attention's scores: some queries of some heads, with all keys that they see.

So a softmax needs no rescaling.

keys        0   1   2   3           a tile of queries sees the keys up to its own last: 10 of 16 tiles of scores here;
queries 0   x                       its scores stay in the cache between the product that makes them and the product
        1   x   x                   that reads them
        2   x   x   x
        3   x   x   x   x
"""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from megatron.core.ops.decisions_overridable_for_memory_prediction import blocks_to_compute


class Tile(NamedTuple):
    """A part of the scores: q[rows] @ k[columns]^T, for q and k [b n, s, d]."""

    rows: tuple[slice, slice]  # heads, queries
    columns: tuple[slice, slice]  # heads, keys


def tiles_of(
    q: Tensor, queries: int, elements: int, *, is_causal: bool = True, window_left: int | None = None
) -> Iterable[Tile]:
    """Return the tiles of q [b n, s, d]: `queries` rows each, of as many heads as keep a tile within `elements` scores.

    is_causal: a query sees no later key. window_left: how many keys it sees before its own; None: all.
    """
    heads, length = q.shape[:2]
    tiles = _tiles(heads, length, queries, elements, is_causal, length if window_left is None else window_left)
    return blocks_to_compute(tiles, _size)


def _tiles(heads: int, length: int, queries: int, elements: int, is_causal: bool, window_left: int) -> Iterator[Tile]:
    for start in range(0, length, queries):
        rows = slice(start, min(start + queries, length))
        keys = slice(max(0, start - window_left), rows.stop if is_causal else length)
        heads_at_once = max(1, elements // (queries * _length(keys)))
        for first_head in range(0, heads, heads_at_once):
            tile_heads = slice(first_head, min(first_head + heads_at_once, heads))
            yield Tile((tile_heads, rows), (tile_heads, keys))


def _length(part: slice) -> int:
    return part.stop - part.start


def _size(tile: Tile) -> int:
    heads, queries = tile.rows
    keys = tile.columns[1]
    return _length(heads) * _length(queries) * _length(keys)


def flatten_batch_and_heads(x: Tensor) -> Tensor:
    """Flatten samples and heads: [b, n, ..] -> [b n, ..]"""
    return x.reshape(-1, *x.shape[2:])


def wide_empty(shape: tuple[int, ...], like: Tensor) -> Tensor:
    """Return uninitialized memory [shape] in the dtype of `like`, but at least float32, on its device."""
    return torch.empty(shape, dtype=torch.promote_types(like.dtype, torch.float32), device=like.device)
