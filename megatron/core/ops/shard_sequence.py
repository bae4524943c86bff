"""Sharding of tensors along the sequence, by the rows of `SequenceShard`."""

import torch
from torch import Tensor

from megatron.core.parallel.rank_grid import Axis
from megatron.core.parallel.zigzag_sequence_row_ranges import SequenceShard


def positions_of(rows: SequenceShard, local_length: int, device: torch.device) -> Tensor:
    """Return the position in the sample of each of the `local_length` rows on this rank: int64 [local_length]."""
    return torch.cat([torch.arange(start, stop, device=device) for start, stop in rows.ranges(local_length)])


def shard_sequence(x: Tensor, axis: Axis, dim: int = 1) -> Tensor:
    """Return this rank's rows of samples that the axis shares: s -> s / ranks of dimension `dim`.

    x: [b, s, ..] with dim 1, [s, b, ..] with dim 0, a mask [b, 1, s, s] with dim 2; contiguous in memory if the axis
    has several ranks, else x itself. Raises ConfigError if the ranks do not divide s.
    """
    if axis.size == 1:
        return x
    rows = SequenceShard(axis)
    local_length = rows.local_length(x.shape[dim])
    shards = [x.narrow(dim, start, stop - start) for start, stop in rows.ranges(local_length)]
    return torch.cat(shards, dim)
