"""Tensors of ours as those of another project: the rows of a family read from right to left."""

import torch
from torch import Tensor

from megatron.core.boxes import slices
from megatron.core.interchange.operations import OPERATIONS, HeadCounts, View


def their_tensors(operation: str, heads: HeadCounts, ours: Tensor) -> list[Tensor]:
    """The tensors that the operation would make `ours` of, on its device and in its dtype."""
    how = OPERATIONS[operation]
    made = [torch.empty(shape, dtype=ours.dtype, device=ours.device) for shape in how.shapes(heads, tuple(ours.shape))]
    for box, view in how.places(heads, [View.of(which, tuple(x.shape)) for which, x in enumerate(made)]):
        made[view.which].as_strided(view.shape, view.strides, view.start).copy_(ours[slices(box)])
    return made
