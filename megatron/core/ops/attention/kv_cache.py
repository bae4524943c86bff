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
        self.length, self.capacity = 0, capacity  # columns filled, columns in all
        self._starts = torch.tensor(starts, device=device)  # [b]
        self._is_padded = any(starts)
        self._held: dict[int, tuple[Tensor, Tensor]] = {}  # layer -> keys, values [capacity, b, groups/t, d]

    sharing: Axis = ALONE  # ranks of which each has a part of the prompts' columns
    shares = False  # whether the next forward is of such a part

    def take(self, tokens: Tensor) -> Tensor:
        """The columns of the next tokens [b, new] that this rank computes, [b, new]."""
        return tokens

    def of_last_column(self, x: Tensor) -> Tensor:
        """What the rank computed that had the prompts' last column, on every rank."""
        return x

    def positions(self, new: int) -> Tensor:
        """Positions of the next `new` columns within their texts, 0 for padding. -> [b, new]"""
        return (self._columns(new) - self._starts[:, None]).clamp(min=0)

    def mask(self, new: int) -> Tensor | None:
        """True where a token of the next `new` columns is masked; None for causal. -> [b, 1, new, length + new]"""
        if not self._is_padded and (new == 1 or self.length == 0):
            return None  # the kernels' causal case, which is faster than a mask
        seen = torch.arange(self.length + new, device=self._starts.device)
        asking = self._columns(new)[:, None]  # [new, 1]
        padding = seen < self._starts[:, None, None]  # [b, 1, length + new]
        return ((seen > asking) | (padding & (seen != asking)))[:, None]

    def append(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Append keys and values [new, b, groups/t, d] of a layer -> all of the layer's so far [length + new, b,
        groups/t, d].

        `length` grows with `advance`, when every layer has appended.
        """
        stop = self.length + k.shape[0]
        assert stop <= self.capacity, f"{stop} columns in a cache of {self.capacity}"
        if layer not in self._held:
            self._held[layer] = tuple(x.new_empty((self.capacity, *x.shape[1:])) for x in (k, v))
        for held, new in zip(self._held[layer], (k, v)):
            held[self.length : stop] = new
        keys, values = self._held[layer]
        return keys[:stop], values[:stop]

    def advance(self, new: int) -> None:
        """Every layer has appended `new` columns."""
        self.length += new

    def _columns(self, new: int) -> Tensor:
        return torch.arange(self.length, self.length + new, device=self._starts.device)


class DecoderCache(KeyValueCache):
    """Of the layers of a decoder beside an encoder: also what they have made of the encoder's result, once for a batch.

    All texts begin in the first column. memory: layer -> keys and values of the encoder's result. tables: of relative
    positions.
    """

    def __init__(self, texts: int, capacity: int, device: torch.device | str = "cpu"):
        super().__init__([0] * texts, capacity, device)
        self.memory: dict[int, tuple[Tensor, Tensor]] = {}
        self.tables: tuple[Tensor, ...] = ()
