"""The matrices that one parameter stacks: for an initial value that follows the sizes of a matrix. Pure integers.

[experts, out, in]                                      the matrix of each expert
[2 f, in], shard={"tp": 0}, blocks=(f, f)               gate [f, in], up [f, in]
[experts, 2 f, in], shard={"tp": 1}, blocks=(f, f)      gate and up of each expert
[G (2 + 1 + 1) d, in], interleaved=(2 d, d, d)          q [G 2 d, in], k [G d, in], v [G d, in]
"""

from dataclasses import dataclass
from itertools import product

from megatron.core.sharding.boxes import Box, whole
from megatron.core.sharding.placement import Placement

Range = tuple[int, int]  # start, stop


@dataclass(frozen=True)
class StackedMatrix:
    """One of the matrices of a tensor: its shape, and where its parts are, as (box in the tensor, box in the matrix)."""

    shape: tuple[int, ...]  # (out, in)
    parts: tuple[tuple[Box, Box], ...]


def stacked_matrices(placement: Placement) -> list[StackedMatrix]:
    """Return the matrices of a global tensor [.., out, in], one for each index of its leading dimensions.

    Those in one tensor [out, in] are apart where it is fused: in `interleaved` groups of its rows, or in `blocks` of the
    dimension that they divide. A vector is one matrix.
    """
    shape = placement.shape
    leading = shape[:-2]
    matrix_shape = shape[-2:]
    fused_dim, fused_ranges = _fused_parts(placement)
    matrices = []
    for index in product(*map(range, leading)):
        stack_box = tuple((i, i + 1) for i in index)
        for ranges in fused_ranges:
            parts = []
            size = 0  # along the fused dimension, of the parts so far
            for start, stop in ranges:
                in_tensor = _with_range(matrix_shape, fused_dim, (start, stop))
                in_matrix = _with_range(matrix_shape, fused_dim, (size, size + stop - start))
                in_leading = tuple((0, 1) for _ in leading)
                parts.append(((*stack_box, *in_tensor), (*in_leading, *in_matrix)))
                size += stop - start
            one_shape = (*matrix_shape[:fused_dim], size, *matrix_shape[fused_dim + 1 :])
            matrices.append(StackedMatrix(one_shape, tuple(parts)))
    return matrices


def _fused_parts(placement: Placement) -> tuple[int, list[list[Range]]]:
    """Return the dimension of the matrix that is fused, and of each matrix the ranges of it."""
    shape = placement.shape
    num_leading = max(len(shape) - 2, 0)
    size = shape[num_leading]

    group = placement.interleaved
    if group and num_leading == 0:
        starts = range(0, size, sum(group))
        ranges_of_parts = []
        offset = 0
        for rows in group:
            ranges_of_parts.append([(start + offset, start + offset + rows) for start in starts])
            offset += rows
        return 0, ranges_of_parts

    fused_dim = next(iter(placement.shard.values()), 0) - num_leading
    if placement.blocks and fused_dim >= 0:
        ranges_of_blocks = []
        offset = 0
        for block in placement.blocks:
            ranges_of_blocks.append([(offset, offset + block)])
            offset += block
        return fused_dim, ranges_of_blocks

    return 0, [[(0, size)]]


def _with_range(shape: tuple[int, ...], dim: int, one: Range) -> Box:
    """Return the box of a whole tensor, but for one dimension."""
    box = whole(shape)
    return (*box[:dim], one, *box[dim + 1 :])
