"""Tensors that lie in other projects' files: pieces with strides, read by the boxes that a rank wants.

A piece is a box of a tensor of ours and the place of its elements in a file: the byte of the first, the dtype, a stride for
each dimension. So a transposed weight, or one head of a fused one, is read where it lies, a bounded part at a time.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from megatron.convert.families.weight_layout import OPERATIONS, HeadCounts, View, shape_of
from megatron.convert.formats.safetensors_header import TensorInFile
from megatron.core.dist_checkpointing import format
from megatron.core.dist_checkpointing.format import ITEM_BYTES, CheckpointError, Piece, TensorRecord
from megatron.core.dist_checkpointing.load_sharded import Checkpoint
from megatron.core.dist_checkpointing.local_tensor import LocalTensor
from megatron.core.offload.stored_tensor import StoredTensor
from megatron.core.sharding.boxes import Box, contiguous_flat_range, intersect, relative_to, size_of, slices, whole
from megatron.core.storage.file_layer import backend_of, read_all

_MOST_AT_ONCE = 16 << 20  # bytes of a file in memory at a time


@dataclass(frozen=True)
class StridedPiece(Piece):
    """One box of one tensor, whose elements lie from `offset` on with these strides."""

    dtype: str = ""
    strides: tuple[int, ...] = ()  # in elements


def record_of(operation: str, heads: HeadCounts, theirs: Sequence[TensorInFile]) -> TensorRecord:
    """The tensor of ours that an operation makes of theirs. Raises ValueError if their shapes do not fit."""
    views = [View.of(which, x.shape) for which, x in enumerate(theirs)]
    places = list(OPERATIONS[operation].places(heads, views))
    pieces = tuple(piece_of(box, view, theirs[view.which]) for box, view in places)
    return TensorRecord(theirs[0].dtype, shape_of([box for box, _ in places]), pieces)


def piece_of(box: Box, view: View, x: TensorInFile) -> StridedPiece:
    """The box of ours that a view of their tensor holds."""
    start = x.start + view.start * ITEM_BYTES[x.dtype]
    return StridedPiece(box, x.file, start, format.item_bytes_of(view.shape, x.dtype), "", x.dtype, view.strides)


def lies_in_order(record: TensorRecord) -> bool:
    """Whether each piece has its elements in the order of ours, so that a part of it lies in one part of the file."""
    return all(list(piece.strides) == sorted(piece.strides, reverse=True) for piece in record.pieces)


class StridedCheckpoint(Checkpoint):
    """A checkpoint in the files of another project, read as `Checkpoint` is. Its files hold no hashes."""

    def has_runs(self, name: str) -> bool:
        return super().has_runs(name) and lies_in_order(self.manifest.tensors[name])

    def runs(self, name: str, rooms: Iterator[Tensor]) -> Iterator[tuple[int, Tensor]]:
        record = self.manifest.tensors[name]
        for piece in record.pieces:
            for part, values in read_box(self.folder, piece, whole(size_of(piece.box)), name):
                box = tuple((start + shift, stop + shift) for (start, stop), (shift, _) in zip(part, piece.box))
                room = next(rooms)[: values.numel() * values.itemsize].view(values.dtype)
                yield contiguous_flat_range(box, record.shape)[0], room.copy_(values.reshape(-1))

    def _fill(self, tensors: dict[str, LocalTensor], in_place: bool) -> None:
        wanted = [
            (piece, what, pair, local)
            for what, local in tensors.items()
            for piece in self.manifest.tensors[what].pieces
            for pair in (*local.pieces, *local.copies)
            if intersect(piece.box, pair[0]) is not None
        ]
        wanted.sort(key=lambda want: (want[0].file, want[0].offset))
        for piece, what, pair, local in wanted:
            box = intersect(piece.box, pair[0])
            region, place = local.region(pair), relative_to(box, pair[0])
            for part, values in read_box(self.folder, piece, relative_to(box, piece.box), what):
                target = tuple((start + shift, stop + shift) for (start, stop), (shift, _) in zip(part, place))
                if isinstance(region, StoredTensor):
                    region.put(target, values)
                else:
                    region[slices(target)].copy_(values)


def read_box(folder: Path, piece: StridedPiece, box: Box, what: str) -> Iterator[tuple[Box, Tensor]]:
    """The elements of a piece in `box` (relative to the piece), in parts: (box relative to `box`, values).

    The values are gone with the next part. Raises CheckpointError with `what`, the tensor's name.
    """
    path, item = folder / piece.file, ITEM_BYTES[piece.dtype]
    room = torch.empty(0, dtype=torch.uint8)
    try:
        with backend_of(path).open(path, "rb") as file:
            for part in _parts(size_of(box), piece.strides, _MOST_AT_ONCE // item):
                starts = (start + inside for (start, _), (inside, _) in zip(box, part))
                first = sum(start * stride for start, stride in zip(starts, piece.strides))
                span = _span(size_of(part), piece.strides) * item
                room = room if len(room) >= span else torch.empty(span, dtype=torch.uint8)
                file.seek(piece.offset + first * item)
                if (count := read_all(file, memoryview(room[:span].numpy()), path)) < span:
                    wrong = f"ends before the last {span - count} bytes of tensor {what!r}"
                    raise CheckpointError(path, wrong, format.DAMAGED)
                values = room[:span].view(getattr(torch, piece.dtype))
                yield part, values.as_strided(size_of(part), piece.strides)
    except OSError as error:
        advice = "every rank must see the folder; is it on a file system that all ranks share?"
        raise CheckpointError(path, f"cannot be read ({error}) for tensor {what!r}", advice) from error


def _span(shape: Sequence[int], strides: Sequence[int]) -> int:
    """Elements from the first to the last of a view."""
    return 1 + sum((size - 1) * stride for size, stride in zip(shape, strides))


def _parts(shape: tuple[int, ...], strides: tuple[int, ...], most: int) -> Iterator[Box]:
    """Boxes of a view, each of at most `most` elements from its first to its last, or of one element."""
    if _span(shape, strides) <= most or prod(shape) == 1:
        yield whole(shape)
        return
    dim = max((dim for dim, size in enumerate(shape) if size > 1), key=lambda dim: strides[dim])
    # As many rows as fit, so that a part is read in one piece.
    rows = max(
        1, min(shape[dim] - 1, (most - _span((*shape[:dim], 1, *shape[dim + 1 :]), strides)) // strides[dim] + 1)
    )
    for start in range(0, shape[dim], rows):
        stop = min(start + rows, shape[dim])
        for part in _parts((*shape[:dim], stop - start, *shape[dim + 1 :]), strides, most):
            yield (*part[:dim], (part[dim][0] + start, part[dim][1] + start), *part[dim + 1 :])
