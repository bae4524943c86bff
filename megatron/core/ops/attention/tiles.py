"""Tiles of attention's scores: some queries of some heads, with all the keys that they meet, so a softmax needs no
rescaling.

keys        0   1   2   3           a tile of queries meets the keys up to its own last: 10 of 16 tiles of scores here;
queries 0   x                       its scores stay in the cache between the product that makes them and the product
        1   x   x                   that reads them
        2   x   x   x
        3   x   x   x   x
"""

import math
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from megatron.core.ops.torch_function_overrides import blocks_to_compute


class Tile(NamedTuple):
    """Its scores are q[rows] @ k[columns]^T, for q and k [b n, s, d]."""

    rows: tuple[slice, slice]  # heads, queries
    columns: tuple[slice, slice]  # heads, keys


def tiles_of(
    q: Tensor, queries: int, elements: int, *, is_causal: bool = True, before: int | None = None
) -> Iterable[Tile]:
    """The tiles of q [b n, s, d], each of so many queries, and of as many heads as keep it within so many scores.

    is_causal: a query meets no later key. before: how many keys it meets before its own; None: all.
    """
    heads, length = q.shape[:2]
    found = _tiles(heads, length, queries, elements, is_causal, length if before is None else before)
    return blocks_to_compute(found, _size)


def _tiles(heads: int, length: int, queries: int, elements: int, is_causal: bool, before: int) -> Iterator[Tile]:
    for start in range(0, length, queries):
        stop = min(start + queries, length)
        keys = slice(max(0, start - before), stop if is_causal else length)
        at_once = max(1, elements // (queries * _length(keys)))
        for first in range(0, heads, at_once):
            some = slice(first, min(first + at_once, heads))
            yield Tile((some, slice(start, stop)), (some, keys))


def _length(part: slice) -> int:
    return part.stop - part.start


def _size(tile: Tile) -> int:
    return math.prod(map(_length, (*tile.rows, tile.columns[1])))


def by_head(x: Tensor) -> Tensor:
    """[b, n, ...] -> [b n, ...]"""
    return x.reshape(-1, *x.shape[2:])


def wide_empty(shape: tuple[int, ...], like: Tensor) -> Tensor:
    """In float32 or wider."""
    return torch.empty(shape, dtype=torch.promote_types(like.dtype, torch.float32), device=like.device)
