"""Masks that hide keys from queries: a tensor, documents, a window.

A kernel that reads them never holds an s x s mask.
"""

from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from megatron.core.ops.attention.query_tiles import Tile


class Documents:
    """A mask of samples that are packed from several documents, which do not attend to each other.

        tokens      a b c | d e | f g h         numbers     0 0 0 1 1 2 2 2

    A kernel that computes document by document never holds an s x s mask; others ask for `mask`.
    """

    def __init__(self, numbers: Tensor):
        """numbers: [b, s], the document of each token within its sample, non-decreasing."""
        self.numbers = numbers

    @cached_property
    def lengths(self) -> list[list[int]]:
        """The tokens of each document of each sample. The first call copies from the device and blocks."""
        return [row.unique_consecutive(return_counts=True)[1].tolist() for row in self.numbers.cpu()]

    @cached_property
    def mask(self) -> Tensor:
        """True where attention is masked, [b, 1, s, s]: later tokens, and other documents."""
        is_other = self.numbers[:, :, None] != self.numbers[:, None, :]  # [b, s, s]
        is_later = torch.ones_like(is_other[0]).triu(1)  # [s, s]
        return (is_other | is_later)[:, None]


class PrefixTrees(Documents):
    """A mask of documents that each are a beginning and several continuations of it, none of which sees another.

        tokens      a b c | d e | f | g h      numbers     0 0 0 0 0 0 1 1
                                               branches    0 0 0 1 1 2 0 0

    Here `a b c` is followed by `d e` and, in the same row, by `f`, each at the positions behind `c`. It has no window:
    a window counts columns.
    """

    def __init__(self, numbers: Tensor, branches: Tensor):
        """numbers, branches: [b, s]; branches: 0 for the beginning, which all see, else the continuation, non-decreasing."""
        super().__init__(numbers)
        self.branches = branches

    @cached_property
    def mask(self) -> Tensor:
        """True where attention is masked, [b, 1, s, s]: later tokens, other documents, other continuations."""
        return super().mask | _is_other_branch(self.branches, self.branches)[:, None]

    @cached_property
    def hidden_by_document(self) -> list[list[Tensor | None]]:
        """The mask of each document of each sample: bool [length, length], True where attention is masked; None: causal."""
        hidden = []
        for branches, lengths in zip(self.branches, self.lengths, strict=True):
            of_sample: list[Tensor | None] = []
            for own, last in zip(branches.split(lengths), branches.cpu()[torch.tensor(lengths).cumsum(0) - 1].tolist()):
                # one continuation alone follows its beginning as any text does
                is_later = torch.ones(len(own), len(own), dtype=torch.bool, device=own.device).triu(1)
                of_sample.append(None if last <= 1 else is_later | _is_other_branch(own, own))
            hidden.append(of_sample)
        return hidden


class QueriesOfTrees(PrefixTrees):
    """A mask of `PrefixTrees` for some of the tokens as queries, all of them being keys.

    tokens      a b c | d e | f g h         the last one of each document is asked alone: queries 4 7
    """

    def __init__(self, trees: PrefixTrees, queries: Tensor):
        """trees: of one sample. queries: [q], the columns of the queries, ascending, of each document one at least."""
        super().__init__(trees.numbers, trees.branches)
        self.trees = trees
        self.queries = queries

    @property
    def lengths(self) -> list[list[int]]:  # type: ignore[override]
        """The tokens of each document, which are its keys."""
        return self.trees.lengths

    @cached_property
    def columns_by_document(self) -> list[list[int]]:
        """The columns of the queries of each document. The first call copies from the device and blocks."""
        (lengths,) = self.lengths
        ends = list(accumulate(lengths))
        columns: list[list[int]] = [[] for _ in lengths]
        document = 0
        for column in self.queries.tolist():
            while column >= ends[document]:
                document += 1
            columns[document].append(column)
        return columns

    @cached_property
    def mask(self) -> Tensor:
        """True where attention is masked, [1, 1, q, s]."""
        return self.trees.mask[:, :, self.queries]

    @cached_property
    def hidden_by_document(self) -> list[list[Tensor | None]]:
        """The mask of each document's queries: bool [queries, length], True where attention is masked."""
        (lengths,) = self.lengths
        (trees,) = self.trees.hidden_by_document
        longest = max(lengths)
        is_later = torch.ones(longest, longest, dtype=torch.bool, device=self.queries.device).triu(1)
        hidden: list[Tensor | None] = []
        past = 0  # column behind the document
        for length, columns, tree in zip(lengths, self.columns_by_document, trees, strict=True):
            whole = is_later if tree is None else tree
            past += length
            if columns == list(range(past - len(columns), past)):  # its last tokens: a view
                hidden.append(whole[length - len(columns) : length, :length])
            else:
                rows = torch.tensor(columns, device=whole.device) - (past - length)
                hidden.append(whole[rows, :length])
        return [hidden]


def _is_other_branch(queries: Tensor, keys: Tensor) -> Tensor:
    """Whether a key is in another continuation than the query: [.., queries, keys] of branches [.., queries], [.., keys]."""
    return (keys[..., None, :] != 0) & (keys[..., None, :] != queries[..., :, None])


@dataclass(frozen=True)
class Window:
    """A sliding window: of the keys that `within` leaves, a query sees its own and the `left` keys before it.

    left 2          keys 0 1 2 3 4
    query 3              . x x x .
    """

    left: int
    within: Tensor | Documents | None


@runtime_checkable
class HoldsTensors(Protocol):
    """A mask, here or of a model's own layers, that holds tensors shared by layers."""

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The tensors of the mask, of any shapes."""
        raise NotImplementedError


@dataclass(frozen=True)
class MaskWithBias(HoldsTensors):
    """A mask with relative positions: `within` hides keys, and `bias` is added to the scores of this rank's heads."""

    bias: Tensor  # [n, s, s], or of this rank's rows alone
    within: Tensor | None

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """bias [n, s, s] and, if there is one, `within` [.., s, s]."""
        return (self.bias,) if self.within is None else (self.bias, self.within)


Mask = (
    Tensor | Documents | Window | MaskWithBias | None
)  # a tensor: [.., s, s], True where attention is masked; None: causal


def tensors_of(mask: object) -> tuple[Tensor, ...]:
    """Return the tensors of a mask, which layers share, in the mask's own shapes.

    mask: a `Mask`, or what a model's own layers take in its place.
    """
    if mask is None:
        return ()
    if isinstance(mask, Tensor):
        return (mask,)
    return mask.tensors if isinstance(mask, HoldsTensors) else ()


def with_window(mask: Tensor | Documents | None, window_left: int | None, keys: int) -> Mask:
    """Return the mask in a window of `window_left` keys before the query.

    mask: bool [.., s, keys], `Documents`, or None for causal. The mask itself is returned if the window has all of the
    `keys`; window_left None: no window.
    """
    has_all_keys = window_left is None or window_left >= keys - 1
    return mask if has_all_keys else Window(window_left, mask)


def of_last_keys(mask: Mask, keys: int) -> Mask:
    """Return the mask of the same queries over the last `keys` alone: bool [.., s, keys], or None for causal.

    Raises TypeError for `Documents`, whose queries are all of the keys.
    """
    if mask is None:
        return None
    if isinstance(mask, Tensor):
        return mask[..., -keys:]
    if isinstance(mask, Window):
        return Window(mask.left, of_last_keys(mask.within, keys))
    if isinstance(mask, MaskWithBias):
        return MaskWithBias(mask.bias[..., -keys:], of_last_keys(mask.within, keys))
    raise TypeError(f"a mask of {type(mask).__name__} has as many queries as keys")


def hidden_keys(mask: Mask, queries: int, keys: int, device: torch.device) -> Tensor:
    """Return the mask as a tensor, bool [.., queries, keys], True where attention is masked.

    The leading dimensions are those of the mask, [b, 1] of `Documents`, none without. The queries are the last of the
    keys.
    """
    if isinstance(mask, Tensor):
        return mask
    if isinstance(mask, Documents):
        return mask.mask
    everything = torch.ones(queries, keys, dtype=torch.bool, device=device)
    is_later = everything.triu(1 + keys - queries)
    if isinstance(mask, Window):
        is_before_window = everything.tril(keys - queries - mask.left - 1)
        return hidden_keys(mask.within, queries, keys, device) | is_later | is_before_window
    return is_later


def hidden_in_tile(mask: Mask, tile: Tile, scores: tuple[int, ...], device: torch.device) -> Tensor:
    """Return the tile's part of `hidden_keys`: bool [heads, queries, keys], or [queries, keys] if all heads have it.

    scores: the shape of all scores, [b, n, s, s]. Unless the mask is a tensor, the tile's last query is its last key.
    """
    heads, queries = tile.rows
    keys = tile.columns[1]
    head_numbers = torch.arange(heads.start, heads.stop, device=device)  # in [b n]
    sample = head_numbers // scores[1]
    if isinstance(mask, Tensor):
        return mask.expand(scores)[sample, head_numbers % scores[1], queries, keys]
    if isinstance(mask, Window) and mask.within is not None:
        by_window = hidden_in_tile(Window(mask.left, None), tile, scores, device)
        within = hidden_in_tile(mask.within, tile, scores, device)
        return torch.logical_or(by_window, within)
    query_count = queries.stop - queries.start
    key_count = keys.stop - keys.start
    if isinstance(mask, Documents):
        documents = mask.numbers[sample]  # [heads, s]
        is_other = documents[:, queries, None] != documents[:, None, keys]
        if isinstance(mask, PrefixTrees):
            branches = mask.branches[sample]  # [heads, s]
            is_other = is_other | _is_other_branch(branches[:, queries], branches[:, keys])
        return hidden_keys(None, query_count, key_count, device) | is_other
    return hidden_keys(mask, query_count, key_count, device)
