"""Relative positions by buckets (arXiv:1910.10683, section 2.1): a head adds to a score what the distance of query and
key says.

    far 4, buckets 4, looking back only         bidirectional, buckets 8
    key      0 1 2 3 4 5 6                      key      0 1 2 3 4 5 6
    query 4  3 3 2 1 0 . .                      query 3  3 2 1 0 5 6 7      later keys have the upper half

Each stack of layers has one table, [buckets, heads], in all of its layers.
"""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

from megatron.core.parallel.grid import Axis
from megatron.core.tensor_parallel import autograd_collectives
from megatron.core.transformer.layer_build_context import LayerContext
from megatron.core.transformer.model_config import ModelConfig


def bucket_of(distance: int, buckets: int, far: int, *, bidirectional: bool) -> int:
    """The bucket of a key that stands `distance` positions behind its query; negative: before it.

    The nearer half of the buckets holds one distance each, the other half grows by powers up to `far`, from where on all
    distances share the last. Looking back only, later keys, which a causal mask hides, count as distance 0.
    """
    first = 0
    if bidirectional:
        buckets //= 2
        first = buckets if distance > 0 else 0
    steps, exact = abs(distance) if bidirectional else max(-distance, 0), buckets // 2
    if steps < exact:
        return first + steps
    share = math.log(steps / exact) / math.log(far / exact)
    return first + min(buckets - 1, exact + int(share * (buckets - exact)))


class RelativePositions(nn.Module):
    """The table of one stack. forward() -> [buckets, heads], the same on every tensor-parallel rank.

    Pipeline stages hand the table on to the next with the hidden states, so its parameter is on the first alone, and its
    gradients come back the same way.
    """

    def __init__(self, config: ModelConfig, context: LayerContext):
        super().__init__()
        shape = config.relative_attention_num_buckets, config.num_attention_heads
        self.weight = context.tp.replicated(shape, config.embedding_init, partial=False)

    def forward(self) -> Tensor:
        return self.weight.clone()  # ZeRO stage 3 gives the parameter up behind its module


class RelativeBias:
    """What a stack's table adds to the scores of this rank's heads."""

    def __init__(self, config: ModelConfig, axis: Axis, *, bidirectional: bool):
        self.buckets, self.far = config.relative_attention_num_buckets, config.relative_attention_max_distance
        self.axis, self.bidirectional = axis, bidirectional
        # By keys and queries: a rank always has the same rows of a whole text, and of a text with a cache the last ones.
        self._rows: dict[tuple[int, int], Tensor] = {}

    def of(self, table: Tensor, length: int, rows: Tensor) -> Tensor:
        """[heads/t, rows, length], in float32 or wider. table: [buckets, heads]. rows: places of the queries, on the CPU.

        The table is equal on all ranks of the tensor-parallel axis, and so is its gradient, by an all-gather in the
        backward.
        Every rank must call.
        """
        if (pair := (length, len(rows))) not in self._rows:
            self._rows[pair] = self._buckets_of_pairs(length, rows).to(table.device)
        mine = autograd_collectives.scatter_last(table, self.axis)
        # Thousands of pairs share a row, whose gradient is their sum.
        wide = mine.to(torch.promote_types(mine.dtype, torch.float32))
        return functional.embedding(self._rows[pair], wide).permute(2, 0, 1)

    def _buckets_of_pairs(self, length: int, rows: Tensor) -> Tensor:
        distances = range(1 - length, length)
        known = [bucket_of(d, self.buckets, self.far, bidirectional=self.bidirectional) for d in distances]
        return torch.tensor(known)[torch.arange(length) - rows[:, None] + length - 1]
