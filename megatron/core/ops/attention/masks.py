"""What hides keys from queries: a tensor, documents, a window. A kernel that computes by them never holds an s x s mask."""

from dataclasses import dataclass
from functools import cached_property
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from megatron.core.ops.attention.tiles import Tile


class Documents:
    """In place of a mask: samples of several documents, which do not attend to each other.

        tokens      a b c | d e | f g h         numbers     0 0 0 1 1 2 2 2

    A kernel that computes document by document never holds an s x s mask; others ask for `mask`.
    """

    def __init__(self, numbers: Tensor):
        """numbers: [b, s], the document of each token within its sample, non-decreasing."""
        self.numbers = numbers

    @cached_property
    def lengths(self) -> list[list[int]]:
        """Tokens of each document of each sample. The first call copies from the device and blocks."""
        return [row.unique_consecutive(return_counts=True)[1].tolist() for row in self.numbers.cpu()]

    @cached_property
    def mask(self) -> Tensor:
        """[b, 1, s, s], True where attention is masked: later tokens, and other documents."""
        other = self.numbers[:, :, None] != self.numbers[:, None, :]
        return (other | torch.ones_like(other[0]).triu(1))[:, None]


@dataclass(frozen=True)
class Window:
    """In place of a mask: of the keys that `within` leaves, a query sees its own and the `before` ones before it.

    before 2        keys 0 1 2 3 4
    query 3              . x x x .
    """

    before: int
    within: Tensor | Documents | None


@runtime_checkable
class HoldsTensors(Protocol):
    """What stands in the place of a mask, here or in a model's own layers, and holds tensors that layers share."""

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        raise NotImplementedError


@dataclass(frozen=True)
class Biased(HoldsTensors):
    """In place of a mask: `within` hides keys, and `bias` is added to the scores of all heads of this rank."""

    bias: Tensor  # [n, s, s], or of this rank's rows alone
    within: Tensor | None

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return (self.bias,) if self.within is None else (self.bias, self.within)


Mask = Tensor | Documents | Window | Biased | None  # a tensor: [.., s, s], True where attention is masked; None: causal


def tensors_of(mask: object) -> tuple[Tensor, ...]:
    """The tensors of a mask, which layers share. mask: a `Mask`, or what a model's own layers take in its place."""
    if mask is None:
        return ()
    if isinstance(mask, Tensor):
        return (mask,)
    return mask.tensors if isinstance(mask, HoldsTensors) else ()


def windowed(mask: Tensor | Documents | None, before: int | None, keys: int) -> Mask:
    """The mask in a window of `before` keys before the query; the mask itself if they are all of `keys`, or None: all."""
    return mask if before is None or before >= keys - 1 else Window(before, mask)


def hidden_keys(mask: Mask, queries: int, keys: int, device: torch.device) -> Tensor:
    """The mask as a tensor, [.., queries, keys], True where attention is masked. The queries are the last of the keys."""
    if isinstance(mask, Tensor):
        return mask
    if isinstance(mask, Documents):
        return mask.mask
    everything = torch.ones(queries, keys, dtype=torch.bool, device=device)
    later = everything.triu(1 + keys - queries)
    if isinstance(mask, Window):
        return (
            hidden_keys(mask.within, queries, keys, device) | later | everything.tril(keys - queries - mask.before - 1)
        )
    return later


def hidden_in_tile(mask: Mask, tile: Tile, scores: tuple[int, ...], device: torch.device) -> Tensor:
    """The tile's part of `hidden_keys`, [heads or 1, queries, keys]. scores: the shape of all, [b, n, s, s]. Unless the
    mask is
    a tensor, the tile's last query is its last key."""
    heads, queries = tile.rows
    keys, numbers = tile.columns[1], torch.arange(heads.start, heads.stop, device=device)
    if isinstance(mask, Tensor):
        return mask.expand(scores)[numbers // scores[1], numbers % scores[1], queries, keys]
    if isinstance(mask, Window) and mask.within is not None:
        parts = (hidden_in_tile(part, tile, scores, device) for part in (Window(mask.before, None), mask.within))
        return torch.logical_or(*parts)
    here = queries.stop - queries.start, keys.stop - keys.start
    if isinstance(mask, Documents):
        documents = mask.numbers[numbers // scores[1]]
        return hidden_keys(None, *here, device) | (documents[:, queries, None] != documents[:, None, keys])
    return hidden_keys(mask, *here, device)
