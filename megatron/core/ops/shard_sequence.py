"""Sharding of tensors along the sequence, by the rows of `SequenceShard`."""

import torch
from torch import Tensor

from megatron.core.parallel.grid import Axis
from megatron.core.parallel.sequence_shard import SequenceShard


def positions_of(rows: SequenceShard, local_length: int, device: torch.device) -> Tensor:
    """Return the position in the sample of each of the `local_length` rows on this rank: [local_length]."""
    return torch.cat([torch.arange(start, stop, device=device) for start, stop in rows.ranges(local_length)])


def shard_sequence(x: Tensor, axis: Axis, dim: int = 1) -> Tensor:
    """Return this rank's rows of samples that the axis shares, cut along `dim`: s -> s / ranks.

    ConfigError if they do not divide.
    """
    if axis.size == 1:
        return x
    rows = SequenceShard(axis)
    local_length = rows.local_length(x.shape[dim])
    shards = [x.narrow(dim, start, stop - start) for start, stop in rows.ranges(local_length)]
    return torch.cat(shards, dim)
