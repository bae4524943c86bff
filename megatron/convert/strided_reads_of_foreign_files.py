"""Read tensors where they are in other projects' files: strided pieces, of which a rank reads the boxes that it needs.

A piece is a box of a tensor of ours and the position of its elements in a file: the byte of the first, the dtype, and a
stride for each dimension. So a transposed weight, or one head of a fused one, is read directly, a bounded number of
bytes at a time.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from megatron.convert.families.strided_views_of_hf_weights import OPERATIONS, HeadCounts, View, shape_of
from megatron.convert.formats.safetensors_header import TensorInFile
from megatron.core.dist_checkpointing import manifest_format
from megatron.core.dist_checkpointing.load_sharded import Checkpoint
from megatron.core.dist_checkpointing.local_tensor import LocalTensor
from megatron.core.dist_checkpointing.manifest_format import ITEM_BYTES, CheckpointError, Piece, TensorRecord
from megatron.core.offload.tensor_in_memory_or_file import StoredTensor
from megatron.core.sharding.boxes import Box, contiguous_flat_range, intersect, relative_to, size_of, slices, whole
from megatron.core.storage.file_layer import backend_of, read_all

_MOST_AT_ONCE = 16 << 20  # bytes of a file in memory at a time


@dataclass(frozen=True)
class StridedPiece(Piece):
    """One box of one tensor, whose elements are in the file from byte `offset` on, with these strides."""

    dtype: str = ""
    strides: tuple[int, ...] = ()  # in elements

    def read(self, folder: Path, box: Box, name: str) -> Iterator[tuple[Box, Tensor]]:
        """Read the elements in `box`, as `read_box` does."""
        return read_box(folder, self, box, name)


def record_of(operation: str, heads: HeadCounts, hf_tensors: Sequence[TensorInFile]) -> TensorRecord:
    """Return the tensor of ours that an operation makes of Hugging Face tensors.

    Raises ValueError if shapes do not fit.
    """
    views = [View.of(tensor_index, x.shape) for tensor_index, x in enumerate(hf_tensors)]
    places = list(OPERATIONS[operation].places(heads, views))
    pieces = tuple(piece_of(box, view, hf_tensors[view.tensor_index]) for box, view in places)
    return TensorRecord(hf_tensors[0].dtype, shape_of([box for box, _ in places]), pieces)


def piece_of(box: Box, view: View, x: TensorInFile) -> StridedPiece:
    """Return the piece for a box of our tensor whose elements are a view of the tensor `x` in a file."""
    offset = x.start + view.start * ITEM_BYTES[x.dtype]
    nbytes = manifest_format.item_bytes_of(view.shape, x.dtype)
    return StridedPiece(box, x.file, offset, nbytes, "", x.dtype, view.strides)


def keeps_order(record: TensorRecord) -> bool:
    """Return whether the file holds each piece's elements in our order.

    Then a part of a piece is a part of the file.

    False for a transposed weight: any row of ours would read nearly all bytes of the piece.
    """
    return all(list(piece.strides) == sorted(piece.strides, reverse=True) for piece in record.pieces)


class StridedCheckpoint(Checkpoint):
    """A checkpoint in the files of another project, which is read through `Checkpoint`'s methods.

    It holds no hashes.
    """

    def has_runs(self, name: str) -> bool:
        return super().has_runs(name) and keeps_order(self.manifest.tensors[name])

    def runs(self, name: str, rooms: Iterator[Tensor]) -> Iterator[tuple[int, Tensor]]:
        """Yield (number of the first element, values [n]) of the tensor's contiguous runs.

        rooms: uint8 buffers [bytes], used in turn; values are gone when their buffer is used again. Any rank may call
        alone. Raises CheckpointError.
        """
        record = self.manifest.tensors[name]
        for piece in record.pieces:
            for part, values in piece.read(self.folder, whole(size_of(piece.box)), name):
                box = _shifted(part, piece.box)
                buffer = next(rooms)[: values.numel() * values.itemsize].view(values.dtype)
                yield contiguous_flat_range(box, record.shape)[0], buffer.copy_(values.reshape(-1))

    def _fill(self, tensors: dict[str, LocalTensor], in_place: bool) -> None:
        # Every piece of the checkpoint that overlaps a piece of this rank, in the order of the files.
        reads = []
        for name, local in tensors.items():
            for piece in self.manifest.tensors[name].pieces:
                for pair in (*local.pieces, *local.copies):
                    if intersect(piece.box, pair[0]) is not None:
                        reads.append((piece, name, pair, local))
        reads.sort(key=lambda read: (read[0].file, read[0].offset))

        for piece, name, pair, local in reads:
            overlap = intersect(piece.box, pair[0])
            region = local.region(pair)
            overlap_in_region = relative_to(overlap, pair[0])
            for part, values in piece.read(self.folder, relative_to(overlap, piece.box), name):
                target = _shifted(part, overlap_in_region)
                if isinstance(region, StoredTensor):
                    region.put(target, values)
                else:
                    region[slices(target)].copy_(values)


def _shifted(part: Box, outer: Box) -> Box:
    """Return `part`, which is relative to the corner of `outer`, in the coordinates of `outer`."""
    return tuple((start + shift, stop + shift) for (start, stop), (shift, _) in zip(part, outer))


def read_box(folder: Path, piece: StridedPiece, box: Box, name: str) -> Iterator[tuple[Box, Tensor]]:
    """Read the elements of a piece in `box` (relative to the piece), in parts: (box relative to `box`, values).

    values: strided, [shape of the part's box]. All parts use one buffer: values are gone with the next part. Raises
    CheckpointError with `name`, the tensor's name.
    """
    path = folder / piece.file
    item_bytes = ITEM_BYTES[piece.dtype]
    buffer = torch.empty(0, dtype=torch.uint8)
    try:
        with backend_of(path).open(path, "rb") as file:
            for part in _parts(size_of(box), piece.strides, _MOST_AT_ONCE // item_bytes):
                # where the part begins, and how many bytes it spans, gaps between its elements included
                corner = (outer + inner for (outer, _), (inner, _) in zip(box, part))
                first_element = sum(index * stride for index, stride in zip(corner, piece.strides))
                nbytes = _span(size_of(part), piece.strides) * item_bytes
                if len(buffer) < nbytes:
                    buffer = torch.empty(nbytes, dtype=torch.uint8)
                # read these bytes, and view the part's elements in them
                file.seek(piece.offset + first_element * item_bytes)
                count = read_all(file, memoryview(buffer[:nbytes].numpy()), path)
                if count < nbytes:
                    wrong = f"ends before the last {nbytes - count} bytes of tensor {name!r}"
                    raise CheckpointError(path, wrong, manifest_format.DAMAGED)
                values = buffer[:nbytes].view(getattr(torch, piece.dtype))
                yield part, values.as_strided(size_of(part), piece.strides)
    except OSError as error:
        advice = "every rank must see the folder; is it on a file system that all ranks share?"
        raise CheckpointError(path, f"cannot be read ({error}) for tensor {name!r}", advice) from error


def _span(shape: Sequence[int], strides: Sequence[int]) -> int:
    """Return the number of elements from the first to the last of a view, gaps included."""
    return 1 + sum((size - 1) * stride for size, stride in zip(shape, strides))


def _parts(shape: tuple[int, ...], strides: tuple[int, ...], most: int) -> Iterator[Box]:
    """Split a view into boxes that span at most `most` elements each, or have one element."""
    if _span(shape, strides) <= most or prod(shape) == 1:
        yield whole(shape)
        return
    # Split the dimension with the largest stride, into as many rows as fit in one read.
    split_dims = [dim for dim, size in enumerate(shape) if size > 1]
    dim = max(split_dims, key=lambda dim: strides[dim])
    before = shape[:dim]
    after = shape[dim + 1 :]
    rows_that_fit = (most - _span((*before, 1, *after), strides)) // strides[dim] + 1
    rows = max(1, min(shape[dim] - 1, rows_that_fit))
    for start in range(0, shape[dim], rows):
        stop = min(start + rows, shape[dim])
        for part in _parts((*before, stop - start, *after), strides, most):
            yield (*part[:dim], (part[dim][0] + start, part[dim][1] + start), *part[dim + 1 :])
