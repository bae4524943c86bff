"""Keys and values of the tokens that a text has so far: with them the forward of a further token computes that token alone.

Columns are tokens in order. Texts of different lengths end in the same column, and so begin in different ones:

    start     columns 0 1 2 3 4 | 5      positions 0 1 2 3 4 | 5
    2                 . . a b c | d                0 0 0 1 2 | 3
    0                 e f g h i | j                0 1 2 3 4 | 5

What lies before a text's start is padding. No token of the text sees it, and it sees itself alone: a softmax over nothing is NaN,
which times a probability of zero is NaN still.
"""

from collections.abc import Sequence

import torch
from torch import Tensor


class KeyValueCache:
    """What the attention layers of one pipeline stage have seen of a batch of texts. Whoever continues the texts owns it.

    It is handed to `forward`, which appends to it: the first forward takes the whole prompts, each further one what is new.
    starts: the column in which each text begins. capacity: columns at most, for which memory is taken at the first forward:
    2 x capacity x texts x groups/t x head width numbers a layer.
    """

    def __init__(self, starts: Sequence[int], capacity: int, device: torch.device | str = "cpu"):
        self.length, self.capacity = 0, capacity  # columns filled, columns there are
        self._starts = torch.tensor(starts, device=device)  # [b]
        self._is_padded = any(starts)
        self._held: dict[int, tuple[Tensor, Tensor]] = {}  # layer -> keys, values [capacity, b, groups/t, d]

    def positions(self, new: int) -> Tensor:
        """The positions of the next `new` columns within their texts, padding at 0. -> [b, new]"""
        return (self._columns(new) - self._starts[:, None]).clamp(min=0)

    def mask(self, new: int) -> Tensor | None:
        """True where a token of the next `new` columns may not look; None for all before it. -> [b, 1, new, length + new]"""
        if not self._is_padded and (new == 1 or self.length == 0):
            return None  # the kernels' own causal case, which is faster
        seen = torch.arange(self.length + new, device=self._starts.device)
        asking = self._columns(new)[:, None]  # [new, 1]
        padding = seen < self._starts[:, None, None]  # [b, 1, length + new]
        return ((seen > asking) | (padding & (seen != asking)))[:, None]

    def append(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Hold the keys and values [new, b, groups/t, d] of a layer -> all of its so far [length + new, b, groups/t, d].

        The columns count from the next `advance` on, when every layer has appended its own.
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
        """All layers have appended `new` columns."""
        self.length += new

    def _columns(self, new: int) -> Tensor:
        return torch.arange(self.length, self.length + new, device=self._starts.device)
