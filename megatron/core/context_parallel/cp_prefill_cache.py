"""The key/value cache of ranks that share the prompts: each computes its part of them, and then has the keys of all.

prompts     columns, padded on the left to 2 c chunks and dealt out as samples are in training
each layer  attention among the ranks by its --cp-comm-type; then one all-gather of the layer's keys and values
each token  computed by every rank alone: it has all keys, and one row could not be divided
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from megatron.core.context_parallel.ring_attention import in_order
from megatron.core.ops.attention.kv_cache import KeyValueCache
from megatron.core.ops.attention.masks import Documents
from megatron.core.ops.shard_sequence import of_my_rows, positions_of
from megatron.core.parallel import collectives
from megatron.core.parallel.grid import Axis
from megatron.core.parallel.sequence_shard import SequenceRows


class SharedCache(KeyValueCache):
    """A cache whose first forward has a part of the columns on each rank of `sharing`; `new` is then the number of these.

    Every rank of the axis must call `take`, `append` and `of_last_column` of the first forward."""

    def __init__(self, starts: Sequence[int], capacity: int, device: torch.device | str, sharing: Axis):
        super().__init__(starts, capacity, device)
        self.sharing, self._added = sharing, 0  # columns of padding before the first

    @property
    def shares(self) -> bool:
        return self.length == 0

    def take(self, tokens: Tensor) -> Tensor:
        if not self.shares:
            return tokens
        self._added = -tokens.shape[1] % (2 * self.sharing.size)
        return of_my_rows(functional.pad(tokens, (self._added, 0)), self.sharing)

    def mask(self, new: int) -> Tensor | Documents | None:
        if not self.shares:
            return super().mask(new)
        if not self._added and not self._is_padded:
            return None
        columns = torch.arange(new * self.sharing.size, device=self._starts.device) - self._added
        return Documents((columns >= self._starts[:, None]).long())  # padding, and the text

    def append(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """In the first forward the result is k and v, of my columns."""
        if not self.shares:
            return super().append(layer, k, v)
        pairs = in_order(collectives.all_gather(torch.stack((k, v), dim=1), self.sharing).chunk(self.sharing.size))
        super().append(layer, *pairs[self._added :].unbind(1))
        return k, v

    def advance(self, new: int) -> None:
        super().advance(new * self.sharing.size - self._added if self.shares else new)

    def of_last_column(self, x: Tensor) -> Tensor:
        return collectives.broadcast(x.contiguous(), self.sharing, source=0)  # which has the last chunk

    def _columns(self, new: int) -> Tensor:
        if not self.shares:
            return super()._columns(new)
        return positions_of(SequenceRows(self.sharing), new, self._starts.device) - self._added
