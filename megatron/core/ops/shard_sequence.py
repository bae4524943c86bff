"""Tensors by the rows of `SequenceRows`."""

import torch
from torch import Tensor

from megatron.core.parallel.grid import Axis
from megatron.core.parallel.sequence_shard import SequenceRows


def positions_of(rows: SequenceRows, held: int, device: torch.device) -> Tensor:
    """[held], the place in the sample of each row that this rank holds."""
    return torch.cat([torch.arange(start, stop, device=device) for start, stop in rows.ranges(held)])


def of_my_rows(x: Tensor, axis: Axis, dim: int = 1) -> Tensor:
    """A rank's rows of samples that the axis shares, cut along `dim`. Raises ConfigError if they do not divide."""
    if axis.size == 1:
        return x
    rows = SequenceRows(axis)
    ranges = rows.ranges(rows.held_of(x.shape[dim]))
    return torch.cat([x.narrow(dim, start, stop - start) for start, stop in ranges], dim)
