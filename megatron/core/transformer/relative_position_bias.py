"""T5's relative position bias (arXiv:1910.10683, section 2.1).

Each head adds a bias to a score, by the distance of query and key. Distances fall into buckets.

    far 4, buckets 4, looking back only         bidirectional, buckets 8
    key      0 1 2 3 4 5 6                      key      0 1 2 3 4 5 6
    query 4  3 3 2 1 0 . .                      query 3  3 2 1 0 5 6 7      later keys have the upper half

Each stack of layers has one weight [buckets, heads], shared by all of its layers.
"""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

from megatron.core.ops.count_flops_by_module import Flops, LayerInput
from megatron.core.parallel.rank_grid import Axis
from megatron.core.tensor_parallel import autograd_collectives
from megatron.core.transformer.layer_parallel_context import LayerContext
from megatron.core.transformer.model_config import ModelConfig


def bucket_of(distance: int, buckets: int, far: int, *, bidirectional: bool) -> int:
    """Return the bucket of a key at the query's position + `distance`.

    The nearer half of the buckets holds one distance each, the other half grows in powers up to `far`; all
    distances from there on share the last bucket. Without `bidirectional` later keys, which a causal mask hides,
    count as distance 0.
    """
    first = 0
    if bidirectional:
        buckets //= 2
        first = buckets if distance > 0 else 0  # the upper half is for later keys
        steps = abs(distance)
    else:
        steps = max(-distance, 0)
    exact = buckets // 2  # buckets of one distance
    if steps < exact:
        return first + steps
    share = math.log(steps / exact) / math.log(far / exact)
    return first + min(buckets - 1, exact + int(share * (buckets - exact)))


class RelativePositionEmbedding(nn.Module):
    """The weight of one stack's relative position bias.

    forward() -> [buckets, heads], equal on all tensor-parallel ranks. Pipeline stages send the weight to the next stage
    with the hidden states, and its gradient back. So the parameter is on the first stage alone.
    """

    def __init__(self, config: ModelConfig, context: LayerContext):
        super().__init__()
        shape = config.relative_attention_num_buckets, config.num_attention_heads
        self.weight = context.tp.replicated(shape, config.embedding_init, partial=False)

    def forward(self) -> Tensor:
        return self.weight.clone()  # ZeRO stage 3 frees the parameter after its module's forward

    def count_flops(self, x: LayerInput) -> Flops:
        return Flops()  # a lookup is no product


class RelativeBiasFromWeight:
    """The bias that a stack's weight adds to the attention scores of this rank's heads."""

    def __init__(self, config: ModelConfig, axis: Axis, *, bidirectional: bool):
        self.buckets = config.relative_attention_num_buckets
        self.far = config.relative_attention_max_distance
        self.axis = axis
        self.bidirectional = bidirectional
        # (keys, queries) -> buckets. The sizes are enough for a key: a rank always has the same rows of a whole text,
        # and with a cache the last rows.
        self._buckets: dict[tuple[int, int], Tensor] = {}

    def bias(self, weight: Tensor, length: int, positions: Tensor) -> Tensor:
        """Return the bias [heads/t, queries, length], in float32 or wider. Every tensor-parallel rank must call.

        weight: [buckets, heads], equal on all ranks of the axis; so is its gradient, by an all-gather in the backward.
        length: number of keys. positions: of the queries, integers [queries], on the CPU.
        """
        sizes = (length, len(positions))
        if sizes not in self._buckets:
            self._buckets[sizes] = self._bucket_matrix(length, positions).to(weight.device)
        local_weight = autograd_collectives.scatter_last(weight, self.axis)  # [buckets, heads/t]
        # widened, since the gradient of a bucket is the sum over thousands of pairs
        wide = local_weight.to(torch.promote_types(local_weight.dtype, torch.float32))
        return functional.embedding(self._buckets[sizes], wide).permute(2, 0, 1)

    def _bucket_matrix(self, length: int, positions: Tensor) -> Tensor:
        """Return the bucket of each pair of a query and a key, [queries, length]."""
        distances = range(1 - length, length)
        buckets = [bucket_of(d, self.buckets, self.far, bidirectional=self.bidirectional) for d in distances]
        return torch.tensor(buckets)[torch.arange(length) - positions[:, None] + length - 1]
