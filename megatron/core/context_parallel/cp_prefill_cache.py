"""The key/value cache of ranks that share the prompts: each computes its part of them, and then has the keys of all.

prompts     columns, padded on the left to 2 c chunks and sharded as samples are in training
each layer  attention among the ranks by its --cp-comm-type; then one all-gather of the layer's keys and values
each token  computed by every rank alone: it has all keys, and one row could not be divided
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from megatron.core.context_parallel.ring_attention import zigzag_to_sample_order
from megatron.core.ops.attention.kv_cache import KeyValueCache
from megatron.core.ops.attention.masks import Documents
from megatron.core.ops.shard_sequence import positions_of, shard_sequence
from megatron.core.parallel import collectives
from megatron.core.parallel.grid import Axis
from megatron.core.parallel.sequence_shard import SequenceShard


class AllGatherKeyValueCache(KeyValueCache):
    """A cache whose first forward has a part of the columns on each rank of `sharing`.

    `new` is then the length of that part. Every rank of the axis must call `take`, `append` and `broadcast_last_column`
    of the first forward.
    """

    def __init__(self, starts: Sequence[int], capacity: int, device: torch.device | str, sharing: Axis):
        super().__init__(starts, capacity, device)
        self.sharing = sharing
        self._left_padding = 0  # columns before the first, which make the prompts divide

    @property
    def shares(self) -> bool:
        """Whether the next forward is the first, in which each rank has its part of the columns."""
        return self.length == 0

    def take(self, tokens: Tensor) -> Tensor:
        """Return this rank's part of the prompts' tokens: [b, columns] -> [b, padded / c].

        padded: the columns, with padding on the left up to a multiple of 2 c. After the first forward the result is the
        next tokens, [b, new], as they are.
        """
        if not self.shares:
            return tokens
        self._left_padding = -tokens.shape[1] % (2 * self.sharing.size)
        padded = functional.pad(tokens, (self._left_padding, 0))
        return shard_sequence(padded, self.sharing)  # [b, padded / c]

    def mask(self, new: int) -> Tensor | Documents | None:
        """Return the mask of the first forward: `Documents` with numbers [b, c new], or None if no column is padding.

        Later masks are those of `KeyValueCache`.
        """
        if not self.shares:
            return super().mask(new)
        if not self._left_padding and not self._is_padded:
            return None
        columns = torch.arange(new * self.sharing.size, device=self._starts.device) - self._left_padding
        is_text = columns >= self._starts[:, None]  # [b, columns]
        return Documents(is_text.long())  # two documents: the padding, and the text

    def append(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Append keys and values [new, b, groups/t, d] of a layer.

        The first forward returns k and v as they are, while the columns of all ranks are appended, which every rank
        must call. Later forwards return all of the layer's, [length + new, b, groups/t, d].
        """
        if not self.shares:
            return super().append(layer, k, v)
        kv = collectives.all_gather(torch.stack((k, v), dim=1), self.sharing)  # [c new, 2, b, groups/t, d], by rank
        kv = zigzag_to_sample_order(
            kv.chunk(self.sharing.size)
        )  # [c new, 2, b, groups/t, d], in the order of the columns
        super().append(layer, *kv[self._left_padding :].unbind(1))
        return k, v

    def advance(self, new: int) -> None:
        columns = new * self.sharing.size - self._left_padding if self.shares else new
        super().advance(columns)

    def broadcast_last_column(self, x: Tensor) -> Tensor:
        """Return x, of any shape, of rank 0, which has the prompts' last chunk. Every rank must call."""
        return collectives.broadcast(x.contiguous(), self.sharing, source=0)  # rank 0 has the last chunk

    def _columns(self, new: int) -> Tensor:
        if not self.shares:
            return super()._columns(new)
        return positions_of(SequenceShard(self.sharing), new, self._starts.device) - self._left_padding
