"""A paged key/value cache: each text has a table of blocks, and takes a new block only when the last one is full.

`pretrain.py` beside it adds the cache to `CACHES` and shows how text is generated with it.

Texts of different lengths then waste less than a block each, where a contiguous cache holds every text at the length of the
longest. Kernels that read blocks where they are would define `attend`; this one collects a layer's entries for the kernel of
the layer, so its scores have the bits of the contiguous cache.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron.core.ops.attention.kv_cache import AttentionCache, Entries

BLOCK = 16  # tokens


class PagedCache(AttentionCache):
    """Entries in blocks of `BLOCK` tokens, shared by all texts; a block belongs to one text."""

    def __init__(self, starts: Sequence[int], capacity: int, device: torch.device | str = "cpu"):
        super().__init__(starts, capacity, device)
        self.first_columns = list(starts)
        self.blocks: list[list[int]] = [[] for _ in starts]  # of each text, in order
        self.used = 0  # blocks of all texts
        self.pools: dict[int, list[Tensor]] = {}  # by layer, for each entry [blocks, BLOCK, ..]

    def append(self, layer: int, entries: Entries) -> None:
        new = entries[0].shape[0]
        self._take_blocks(self.length + new)
        pools = self.pools.setdefault(layer, [entry.new_empty((0, BLOCK, *entry.shape[2:])) for entry in entries])
        for number, entry in enumerate(entries):
            if len(pools[number]) < self.used:
                grown = entry.new_zeros((max(self.used, 2 * len(pools[number])), BLOCK, *entry.shape[2:]))
                grown[: len(pools[number])] = pools[number]
                pools[number] = grown
            for text, first in enumerate(self.first_columns):
                columns = range(max(self.length, first), self.length + new)  # without padding
                where = self._places(text, [column - first for column in columns])
                pools[number].flatten(0, 1)[where] = entry[columns.start - self.length :, text]

    def entries(self, layer: int, stop: int) -> Entries:
        gathered = []
        for pool in self.pools[layer]:
            out = pool.new_zeros((stop, len(self.blocks), *pool.shape[2:]))  # padding stays 0
            for text, first in enumerate(self.first_columns):
                out[first:, text] = pool.flatten(0, 1)[self._places(text, range(stop - first))]
            gathered.append(out)
        return tuple(gathered)

    def _take_blocks(self, stop: int) -> None:
        """Give each text the blocks that it needs for its tokens before column `stop`."""
        for own, first in zip(self.blocks, self.first_columns):
            while len(own) * BLOCK < stop - first:
                own.append(self.used)
                self.used += 1

    def _places(self, text: int, positions: Sequence[int]) -> Tensor:
        """Return the places of a text's tokens among all blocks' tokens."""
        own = self.blocks[text]
        places = [own[position // BLOCK] * BLOCK + position % BLOCK for position in positions]
        return torch.tensor(places, dtype=torch.int64, device=self.starts.device)
