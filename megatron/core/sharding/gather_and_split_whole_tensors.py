"""Whole tensors of which the ranks of an axis hold parts, for values that need them, such as a singular value decomposition.

    whole = whole_tensor(linear.weight, tp.axis)              [out, in] on every rank of tp
    linear.weight.copy_(part_of_whole(whole, linear.weight, tp.axis))

A result of whole tensors has the same bits in every layout.
"""

import json

import torch
from torch import Tensor

from megatron.core.parallel import collectives
from megatron.core.parallel.rank_grid import Axis
from megatron.core.sharding.boxes import Box, slices
from megatron.core.sharding.placement import pieces, placement_of


def whole_tensor(parameter: Tensor, axis: Axis) -> Tensor:
    """Return a parameter's values in the shape of its placement, on every rank of the axis, which all must call.

    parameter: [shape on this rank], with a placement; a copy in new memory, without padding, and without a gradient.
    """
    own = parameter.detach()
    placement = placement_of(parameter)
    if axis.name in placement.replicated_over:
        return own.clone()
    whole = own.new_zeros(placement.shape)
    texts = collectives.all_gather_texts(json.dumps(_pieces_here(parameter, axis)), axis, own.device)
    parts = collectives.all_gather(own.contiguous(), axis).chunk(axis.size)  # one per rank
    for text, part in zip(texts, parts, strict=True):
        for box, local in json.loads(text):
            whole[slices(box)] = part[slices(local)]
    return whole


def part_of_whole(whole: Tensor, parameter: Tensor, axis: Axis) -> Tensor:
    """Return this rank's part of a whole tensor, placed as the parameter is: [placement's shape] -> [shape on this rank].

    Padding is zero. Raises ValueError if `whole` has another shape than the placement. Nothing is communicated.
    """
    placement = placement_of(parameter)
    if tuple(whole.shape) != tuple(placement.shape):
        raise ValueError(
            f"part_of_whole: a tensor of shape {tuple(whole.shape)} for a parameter of which the whole has {placement.shape}"
        )
    part = torch.zeros(parameter.shape, dtype=whole.dtype, device=whole.device)
    for box, local in _pieces_here(parameter, axis):
        part[slices(local)] = whole[slices(box)]
    return part


def _pieces_here(parameter: Tensor, axis: Axis) -> list[tuple[Box, Box]]:
    """Return (box in the whole tensor, box in this rank's part) of each piece of the parameter."""
    return pieces(placement_of(parameter), tuple(parameter.shape), {axis.name: axis})
