"""The key/value cache of generation: the forward of a further token computes that token alone.

Columns are tokens in order. Texts of different lengths end in the same column, so they begin in different columns:

    start     columns 0 1 2 3 4 | 5      positions 0 1 2 3 4 | 5
    2                 . . a b c | d                0 0 0 1 2 | 3
    0                 e f g h i | j                0 1 2 3 4 | 5

Columns before a text's start are padding. No token of the text attends to padding. Padding attends to itself: a
softmax over no key is NaN, and NaN times a probability of zero is still NaN.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron.core.parallel.grid import ALONE, Axis


class KeyValueCache:
    """Keys and values of a batch of texts, for the attention layers of one pipeline stage. The caller owns it.

    `forward` appends to it: the first forward processes the whole prompts, each later one the new tokens.
    starts: the column in which each text begins. capacity: the most columns; the first forward allocates
    2 x capacity x texts x groups/t x head width numbers per layer.
    """

    def __init__(self, starts: Sequence[int], capacity: int, device: torch.device | str = "cpu"):
        self.length = 0  # columns filled
        self.capacity = capacity
        self._starts = torch.tensor(starts, device=device)  # [b]
        self._is_padded = any(starts)
        self._keys_values: dict[int, tuple[Tensor, Tensor]] = {}  # layer -> keys, values [capacity, b, groups/t, d]

    sharing: Axis = ALONE  # the ranks over which the prompts' columns are sharded
    shares = False  # whether the next forward has such a shard of the columns

    def take(self, tokens: Tensor) -> Tensor:
        """Return the columns of the next tokens [b, new] that this rank computes: here all of them."""
        return tokens

    def broadcast_last_column(self, x: Tensor) -> Tensor:
        """Return x of the rank that had the prompts' last column, on every rank."""
        return x

    def positions(self, new: int) -> Tensor:
        """Return the positions of the next `new` columns within their texts, 0 for padding: [b, new]."""
        return (self._columns(new) - self._starts[:, None]).clamp(min=0)

    def mask(self, new: int) -> Tensor | None:
        """Return the mask of the next `new` columns, [b, 1, new, length + new], True where attention is masked; None for
        causal."""
        if not self._is_padded and (new == 1 or self.length == 0):
            return None  # the kernels' causal case, which is faster than a mask
        keys = torch.arange(self.length + new, device=self._starts.device)  # columns
        queries = self._columns(new)[:, None]  # [new, 1]
        is_padding = keys < self._starts[:, None, None]  # [b, 1, length + new]
        return ((keys > queries) | (is_padding & (keys != queries)))[:, None]

    def append(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Append keys and values [new, b, groups/t, d] of a layer; return all of the layer's so far, [length + new, b,
        groups/t, d].

        `length` grows with `advance`, when every layer has appended.
        """
        stop = self.length + k.shape[0]
        assert stop <= self.capacity, f"{stop} columns in a cache of {self.capacity}"
        if layer not in self._keys_values:
            keys = k.new_empty((self.capacity, *k.shape[1:]))
            values = v.new_empty((self.capacity, *v.shape[1:]))
            self._keys_values[layer] = keys, values
        keys, values = self._keys_values[layer]
        keys[self.length : stop] = k
        values[self.length : stop] = v
        return keys[:stop], values[:stop]

    def advance(self, new: int) -> None:
        """Count `new` columns, which every layer has appended."""
        self.length += new

    def _columns(self, new: int) -> Tensor:
        return torch.arange(self.length, self.length + new, device=self._starts.device)


class DecoderCache(KeyValueCache):
    """The cache of a decoder with cross attention: also the keys and values of the encoder's output, computed once for a
    batch.

    All texts begin in the first column. memory: layer -> keys and values of the encoder's output. tables: biases of
    relative positions.
    """

    def __init__(self, texts: int, capacity: int, device: torch.device | str = "cpu"):
        super().__init__([0] * texts, capacity, device)
        self.memory: dict[int, tuple[Tensor, Tensor]] = {}
        self.tables: tuple[Tensor, ...] = ()
