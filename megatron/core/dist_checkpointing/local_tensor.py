"""One rank's part of a tensor, as saving and loading see it."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import mul

import torch
from torch import Tensor

from megatron.core.dist_checkpointing.manifest_format import ITEM_BYTES, show_box
from megatron.core.offload.tensor_in_memory_or_file import Stored, StoredTensor
from megatron.core.parallel.mesh import Mesh
from megatron.core.parallel.rank_grid import ALONE, Axis
from megatron.core.sharding.boxes import Box, is_within, size_of, slices, whole
from megatron.core.sharding.placement import Placement, owned_pieces, pieces


@dataclass(frozen=True, eq=False)
class LocalTensor:
    """This rank's part of one tensor.

    `pieces` are (box in the global tensor, box in `tensor`), as `placement.pieces` gives them: two for a fused gate|up,
    none on a rank that holds only padding. If `tensor` is flat, its boxes are runs of elements in row-major order, so
    that the shard of a ZeRO optimizer needs no reshaping:

        global (3, 4), shard 2:9 of its 12 elements   [0:1, 2:4] <- [0:2],  [1:2, 0:4] <- [2:6],  [2:3, 0:1] <- [6:7]

    `tensor` is [local shape], or flat, [elements].
    """

    tensor: Stored  # on any device; boxes of one in a file must be of full rows
    shape: tuple[int, ...]  # of the global tensor, without padding
    pieces: list[tuple[Box, Box]]
    is_writer: bool  # exactly one of the ranks that hold a piece writes it
    copies: tuple[tuple[Box, Box], ...] = ()  # further pieces, which another rank writes and this one only reads
    # The ranks that hold equal pieces, one of them the writer; a save divides the pieces among them (`write_balance.py`).
    replicas: Axis = ALONE

    @property
    def dtype(self) -> str:
        """The dtype's name, as in `format.ITEM_BYTES`."""
        return str(self.tensor.dtype).removeprefix("torch.")

    def region(self, piece: tuple[Box, Box]) -> Stored:
        """Return the view of `tensor` that holds a piece [shape of the piece's global box]."""
        global_box, local_box = piece
        if isinstance(self.tensor, StoredTensor):
            return self.tensor.box(local_box).view(size_of(global_box))
        return self.tensor.detach()[slices(local_box)].view(size_of(global_box))


def global_shape_offset_and_parts(
    shape: tuple[int, ...], divided: Mapping[int, Sequence[int]]
) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """Return (shape of the global tensor, the offset of this part in it, number of parts along each axis).

    shape: of this part. divided: axis -> (number of this part, parts), for equal parts.
    """
    axes = range(len(shape))
    numbers = tuple(divided.get(axis, (0, 1))[0] for axis in axes)
    parts = tuple(divided.get(axis, (0, 1))[1] for axis in axes)
    global_shape = tuple(map(mul, shape, parts))
    offset = tuple(map(mul, shape, numbers))
    return global_shape, offset, parts


def tensor_at(tensor: Tensor, offset: tuple[int, ...], shape: tuple[int, ...], *, is_writer: bool) -> LocalTensor:
    """Return this rank's box of a tensor of `shape`: tensor [size of the box] begins at `offset`.

    One rank of a box must be its writer.
    """
    box = tuple((start, start + size) for start, size in zip(offset, tensor.shape, strict=True))
    return LocalTensor(tensor, tuple(shape), [(box, whole(tensor.shape))], is_writer)


def placed_tensor(tensor: Stored, placement: Placement, mesh: Mesh) -> LocalTensor:
    """Return this rank's part of a parameter of this placement, or of an optimizer state in a parameter's shape.

    tensor: [parameter's shape on this rank], with padding; the result says which of its elements count.
    """
    shape = tuple(tensor.shape)
    owned = owned_pieces(placement, shape, mesh)
    copies = tuple(pair for pair in pieces(placement, shape, mesh) if pair not in owned)
    replicas = mesh.grad_axes(placement.reduce_over).reduce
    is_writer = bool(owned) and replicas.is_first
    return LocalTensor(tensor, placement.shape, owned, is_writer, copies, replicas)


def problems_of_tensors(tensors: dict[str, LocalTensor]) -> list[str]:
    """Return the problems that prevent saving or loading: dtypes, layouts, boxes. tensors: by name, of any shapes."""
    return [problem for name, local in tensors.items() for problem in _problems_of(name, local)]


def _problems_of(name: str, local: LocalTensor) -> list[str]:
    if local.dtype not in ITEM_BYTES:
        return [f"tensor {name!r} has dtype {local.dtype}; a checkpoint holds {', '.join(ITEM_BYTES)}"]
    if local.tensor.layout != torch.strided:
        return [f"tensor {name!r} is {local.tensor.layout}; a checkpoint holds dense tensors"]
    problems = []
    for global_box, local_box in (*local.pieces, *local.copies):
        if not (is_within(global_box, local.shape) and is_within(local_box, local.tensor.shape)):
            problems.append(
                f"tensor {name!r}: the boxes {show_box(global_box)} <- {show_box(local_box)} do not lie within the whole "
                f"shape {tuple(local.shape)} and the local shape {tuple(local.tensor.shape)}"
            )
        elif not _have_equal_elements(size_of(global_box), size_of(local_box), local.tensor.is_contiguous()):
            problems.append(
                f"tensor {name!r}: box {show_box(global_box)} cannot be taken from box {show_box(local_box)}"
            )
    return problems


def _have_equal_elements(global_size: tuple[int, ...], local_size: tuple[int, ...], is_contiguous: bool) -> bool:
    """Return whether the boxes have one shape, or the local box is a flat run of as many elements."""
    if global_size == local_size:
        return True
    is_flat_run = is_contiguous and len(local_size) == 1 and math.prod(global_size) == local_size[0]
    return is_flat_run and len(global_size) != 1
