"""The cache of generation: the forward of a further token computes that token alone.

Columns are tokens in order. Texts of different lengths end in the same column, so they begin in different columns:

    start     columns 0 1 2 3 4 | 5      positions 0 1 2 3 4 | 5
    2                 . . a b c | d                0 0 0 1 2 | 3
    0                 e f g h i | j                0 1 2 3 4 | 5

Columns before a text's start are padding. No token of the text attends to padding. Padding attends to itself: a
softmax over no key is NaN, and NaN times a probability of zero is still NaN.

`AttentionCache` is the interface: a layer gives it queries and the new tokens' entries (keys and values, or what another
attention keeps of a token), and it calls the layer's attention on all entries. `CACHES` has the implementations by name.
"""

from collections.abc import Callable, Sequence
from copy import copy
from typing import Any, Protocol

import torch
from torch import Tensor

from megatron.core.base.registry_with_checked_entries import Registry
from megatron.core.ops.attention.document_and_window_masks import Mask, of_last_keys
from megatron.core.parallel.rank_grid import ALONE, Axis

Entries = tuple[
    Tensor, ...
]  # of tokens in one layer, each [tokens, b, ..]; keys and values are [tokens, b, groups/t, d]


class LayerAttention(Protocol):
    """The attention of one layer over entries, with its window, caps, sinks and mask.

    An attention of a script's own inherits it and defines `compute`, and `over_whole_sequence` if ranks of context
    parallelism may share the prompts.
    """

    mask: Mask = None  # of the new tokens over all columns so far, as `AttentionCache.mask` returns it
    window_left: int | None = None  # keys that a token sees before itself; None: all

    def compute(self, q: Tensor, *entries: Tensor) -> Tensor:
        """Return the attention of q [new, b, n/t, d] over entries [length + new, b, ..]: [new, b, n/t d]."""
        raise NotImplementedError

    def over_whole_sequence(self) -> "LayerAttention":
        """Return it for entries that every rank of a shared sequence has in full."""
        return self

    def over_last_columns(self, columns: int) -> "LayerAttention":
        """Return it for the entries of the last `columns` alone, if the mask or the window hides all earlier ones."""
        limited = copy(self)
        limited.mask = of_last_keys(self.mask, columns)
        return limited


class AttentionCache:
    """The entries of a batch of texts, for the attention layers of one pipeline stage. The caller owns it.

    The first forward processes the whole prompts, each later one the new tokens. In each forward every layer calls
    `attend` once, in the order of the layers; then `advance` counts the forward's columns.
    starts: the column in which each text begins, so that `positions` are its own. capacity: the most columns; a text that
    outgrows it begins with a new cache.

    A subclass defines `append` and `entries`, or `attend` if its kernel reads the entries where they are; then it needs
    `append` only where ranks share the prompts. `attend` calls `append`, then `entries`, each once.
    Attributes of a subclass need names that this class does not have; to assign one that it has raises AttributeError.
    """

    def __init__(self, starts: Sequence[int], capacity: int, device: torch.device | str = "cpu"):
        self.__length = 0
        self.__capacity = capacity
        self.__starts = torch.tensor(starts, device=device)  # [b]
        self.__is_padded = any(starts)

    def __setattr__(self, name: str, value: Any) -> None:
        if hasattr(AttentionCache, name) and not name.startswith("_"):
            raise AttributeError(
                f"{type(self).__name__}.{name} is AttentionCache's own; choose another name for the attribute"
            )
        super().__setattr__(name, value)

    @property
    def length(self) -> int:
        """The columns of earlier forwards; in `append` and `attend` the new tokens are columns from here on."""
        return self.__length

    @property
    def capacity(self) -> int:
        """The most columns that there will be."""
        return self.__capacity

    @property
    def starts(self) -> Tensor:
        """The column in which each text begins: int64 [b], on the cache's device."""
        return self.__starts

    @property
    def is_padded(self) -> bool:
        """Whether any text begins behind column 0."""
        return self.__is_padded

    @property
    def sharing(self) -> Axis:
        """The ranks over which the prompts' columns are sharded."""
        return ALONE

    @property
    def shares(self) -> bool:
        """Whether the next forward has such a shard of the columns."""
        return False

    def append(self, layer: int, entries: Entries) -> None:
        """Store the entries of the next columns, each [new, b, ..]: columns `length` to `length` + new.

        layer: its number over the whole model, from 0; the layers of this stage alone occur.
        """
        raise NotImplementedError(f"{type(self).__name__} defines neither append(layer, entries) nor attend")

    def entries(self, layer: int, stop: int) -> Entries:
        """Return the entries of columns 0 to `stop` of a layer, each [stop, b, ..]; those of padding may be anything finite."""
        raise NotImplementedError(f"{type(self).__name__} defines neither entries(layer, stop) nor attend")

    def attend(self, layer: int, q: Tensor, entries: Entries, attention: LayerAttention) -> Tensor:
        """Store the entries of the next columns; return the attention of their queries over all columns so far.

        q: [new, b, n/t, d]. entries: each [new, b, ..]. Returns [new, b, n/t d].
        """
        self.append(layer, entries)
        return attention.compute(q, *self.entries(layer, self.length + q.shape[0]))

    def advance(self, new: int) -> None:
        """Count `new` columns, for which every layer has attended."""
        self.__length += new

    def take(self, tokens: Tensor) -> Tensor:
        """Return the columns of the next tokens, int64 [b, new], that this rank computes: here all of them."""
        return tokens

    def broadcast_last_column(self, x: Tensor) -> Tensor:
        """Return x of the rank that had the prompts' last column, on every rank: here x itself.

        x: [b, v], the logits of the next tokens. Where several ranks share the columns, all of them must call.
        """
        return x

    def positions(self, new: int) -> Tensor:
        """Return the positions of the next `new` columns within their texts, 0 for padding: int64 [b, new]."""
        return (self.columns(new) - self.starts[:, None]).clamp(min=0)

    def mask(self, new: int) -> Mask:
        """Return the mask of the next `new` columns: bool [b, 1, new, length + new], True where attention is masked.

        None for causal attention.
        """
        if not self.is_padded and (new == 1 or self.length == 0):
            return None  # the kernels' causal case, which is faster than a mask
        keys = torch.arange(self.length + new, device=self.starts.device)  # columns
        queries = self.columns(new)[:, None]  # [new, 1]
        is_padding = keys < self.starts[:, None, None]  # [b, 1, length + new]
        return ((keys > queries) | (is_padding & (keys != queries)))[:, None]

    def columns(self, new: int) -> Tensor:
        """Return the numbers of the next `new` columns: int64 [new]."""
        return torch.arange(self.length, self.length + new, device=self.starts.device)


class KeyValueCache(AttentionCache):
    """A cache in one tensor for each entry of a layer, [capacity, b, ..], which the first forward allocates.

    Keys and values take 2 x capacity x texts x groups/t x head width numbers per layer.
    """

    def __init__(self, starts: Sequence[int], capacity: int, device: torch.device | str = "cpu"):
        super().__init__(starts, capacity, device)
        self._entries: dict[int, Entries] = {}  # by layer, each [capacity, b, ..]

    def append(self, layer: int, entries: Entries) -> None:
        stop = self.length + entries[0].shape[0]
        assert stop <= self.capacity, f"{stop} columns in a cache of {self.capacity}"
        if layer not in self._entries:
            self._entries[layer] = tuple(new.new_empty((self.capacity, *new.shape[1:])) for new in entries)
        for stored, new in zip(self._entries[layer], entries, strict=True):
            stored[self.length : stop] = new

    def entries(self, layer: int, stop: int) -> Entries:
        return tuple(stored[:stop] for stored in self._entries[layer])


class CrossAttentionCache(AttentionCache):
    """Keys and values of the encoder's output, which the first forward gives each layer: each [m, b, ..]."""

    def __init__(self, texts: int, capacity: int, device: torch.device | str = "cpu"):
        super().__init__([0] * texts, capacity, device)
        self._entries: dict[int, Entries] = {}  # by layer

    def holds(self, layer: int) -> bool:
        """Return whether the layer's entries are stored, so that it need not compute them again."""
        return layer in self._entries

    def append(self, layer: int, entries: Entries) -> None:
        if entries:
            self._entries[layer] = entries

    def entries(self, layer: int, stop: int) -> Entries:
        return self._entries[layer]


class DecoderCache(AttentionCache):
    """The cache of a decoder with cross attention: of its own text, and of the encoder's output, made once a batch.

    All texts begin in the first column. make: the cache of the decoder's text, as an entry of `CACHES`. memory: of the
    encoder's output. tables: the weights [buckets, n] of the relative positions' biases.
    """

    def __init__(
        self,
        texts: int,
        capacity: int,
        device: torch.device | str = "cpu",
        make: Callable[[Sequence[int], int, torch.device | str], AttentionCache] = KeyValueCache,
    ):
        super().__init__([0] * texts, capacity, device)
        self._text = make([0] * texts, capacity, device)
        self.memory = CrossAttentionCache(texts, capacity, device)
        self.tables: tuple[Tensor, ...] = ()

    def attend(self, layer: int, q: Tensor, entries: Entries, attention: LayerAttention) -> Tensor:
        return self._text.attend(layer, q, entries, attention)

    def advance(self, new: int) -> None:
        self._text.advance(new)
        super().advance(new)


# A script adds its own: CACHES["paged"] = PagedCache
CACHES = Registry("CACHES", ("starts", "capacity", "device"), {"contiguous": KeyValueCache})
