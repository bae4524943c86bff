"""The cache of ranks that share the prompts: each computes its part of them, and then has the keys of all.

prompts     columns, padded on the left to 2 c chunks and sharded as samples are in training
each layer  attention among the ranks by its --cp-comm-type; then one all-gather of the layer's keys and values
each token  computed by every rank alone: it has all keys, and one row could not be divided
"""

import torch
from torch import Tensor
from torch.nn import functional

from megatron.core.context_parallel.ring_and_allgather_attention import zigzag_to_sample_order
from megatron.core.ops.attention.document_and_window_masks import Documents, Mask
from megatron.core.ops.attention.kv_cache import AttentionCache, Entries, LayerAttention
from megatron.core.ops.shard_sequence import positions_of, shard_sequence
from megatron.core.parallel import collectives
from megatron.core.parallel.rank_grid import Axis
from megatron.core.parallel.zigzag_sequence_row_ranges import SequenceShard


class PromptShardedCache(AttentionCache):
    """A cache whose first forward has a part of the columns on each rank of `sharing`; `inner` stores those of all.

    `new` is then the length of that part. Every rank of the axis must call `take`, `attend` and `broadcast_last_column`
    of the first forward.
    """

    def __init__(self, inner: AttentionCache, sharing: Axis):
        super().__init__(inner.starts.tolist(), inner.capacity, inner.starts.device)
        self.inner = inner
        self._sharing = sharing
        self._left_padding = 0  # columns before the first, which make the prompts divide

    @property
    def sharing(self) -> Axis:
        return self._sharing

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

    def mask(self, new: int) -> Mask:
        """Return the mask of the first forward: `Documents` with numbers [b, c new], or None if no column is padding.

        Later masks are those of `inner`.
        """
        if not self.shares:
            return self.inner.mask(new)
        if not self._left_padding and not self.is_padded:
            return None
        columns = torch.arange(new * self.sharing.size, device=self.starts.device) - self._left_padding
        is_text = columns >= self.starts[:, None]  # [b, columns]
        return Documents(is_text.long())  # two documents: the padding, and the text

    def attend(self, layer: int, q: Tensor, entries: Entries, attention: LayerAttention) -> Tensor:
        """Store entries [new, b, ..] and attend, as `AttentionCache.attend`.

        In the first forward the ranks attend among themselves, and the entries of all ranks are stored. Then every rank
        has all entries, and computes the new tokens alone.
        """
        if not self.shares:
            return self.inner.attend(layer, q, entries, attention.over_whole_sequence())
        self.inner.append(layer, self._of_all_ranks(entries))
        return attention.compute(q, *entries)

    def _of_all_ranks(self, entries: Entries) -> Entries:
        """Return the columns of all ranks, in order and without the padding: [new, b, ..] -> [columns, b, ..] each."""
        flat = torch.cat([entry.flatten(2) for entry in entries], dim=-1)  # [new, b, numbers of all entries]
        gathered = collectives.all_gather(flat, self.sharing)  # [c new, b, ..], by rank
        columns = zigzag_to_sample_order(gathered.chunk(self.sharing.size))[self._left_padding :]
        parts = columns.split([entry[0, 0].numel() for entry in entries], dim=-1)
        return tuple(part.unflatten(-1, entry.shape[2:]) for part, entry in zip(parts, entries, strict=True))

    def advance(self, new: int) -> None:
        columns = new * self.sharing.size - self._left_padding if self.shares else new
        self.inner.advance(columns)
        super().advance(columns)

    def broadcast_last_column(self, x: Tensor) -> Tensor:
        """Return x, of any shape, of rank 0, which has the prompts' last chunk. Every rank must call."""
        return collectives.broadcast(x.contiguous(), self.sharing, source=0)  # rank 0 has the last chunk

    def columns(self, new: int) -> Tensor:
        if not self.shares:
            return self.inner.columns(new)
        return positions_of(SequenceShard(self.sharing), new, self.starts.device) - self._left_padding
