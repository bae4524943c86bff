"""Loading: each rank intersects the boxes of its tensors with the saved boxes, whatever layout wrote them.

    checkpoint = open_checkpoint(root, world=world)       the latest, or iteration=100
    checkpoint.state, checkpoint.names
    checkpoint.read_into(tensors, world)                  fills this rank's tensors

A rank reads only pieces that overlap its tensors, each once and completely, and checks the hash before it uses the
values.
"""

import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from megatron.core.dist_checkpointing import checkpoint_folder, manifest_format
from megatron.core.dist_checkpointing.local_tensor import LocalTensor, problems_of_tensors
from megatron.core.dist_checkpointing.manifest_format import CheckpointError, Manifest, Piece
from megatron.core.offload.tensor_in_memory_or_file import Stored, StoredTensor
from megatron.core.parallel import collectives
from megatron.core.parallel.rank_grid import ALONE, Axis
from megatron.core.sharding.boxes import Box, contiguous_flat_range, intersect, relative_to, size_of, slices, whole
from megatron.core.storage import file_layer
from megatron.core.storage.object_store_read_ahead import FileSpan
from megatron.core.storage.path_or_url import path_of

_CHUNK = 16 << 20  # bytes read and hashed at a time, while they are in the cache


@dataclass(frozen=True)
class Checkpoint:
    """One saved iteration, whose manifest has been read and checked."""

    folder: Path
    manifest: Manifest
    warning: str = ""  # why the default choice of this iteration may surprise

    @property
    def iteration(self) -> int:
        return self.manifest.iteration

    @property
    def state(self) -> dict[str, Any]:
        """The JSON state that was saved beside the tensors."""
        return self.manifest.state

    @property
    def names(self) -> list[str]:
        """The names of all tensors, in saved order."""
        return list(self.manifest.tensors)

    def read_into(
        self,
        tensors: dict[str, LocalTensor],
        world: Axis = ALONE,
        *,
        convert: bool = False,
        device: torch.device | str = "cpu",
        in_place: bool = False,
    ) -> None:
        """Read the pieces and copies of `tensors`; padding keeps its values, and `is_writer` is ignored.

        tensors: name -> this rank's part; its `shape` must be that of the saved tensor. Every rank of `world` (default:
        this rank alone) must call. If one fails, all raise CheckpointError or PeerError, and tensors may be partly
        filled. convert: allow conversion between floating dtypes. Saved tensors that are not in `tensors` are ignored;
        compare `names`. The largest piece is buffered in host memory. in_place: read a piece without this buffer where
        the tensor has it in the same order as the file; damaged values are then in the tensor when this raises.
        """
        with collectives.raise_together(world, device):
            self._check(tensors, convert)
            with torch.no_grad():
                self._fill(tensors, in_place)

    def has_runs(self, name: str) -> bool:
        """Return whether `runs` can give this tensor: each of its pieces is one run of elements in row-major order."""
        record = self.manifest.tensors[name]
        return all(contiguous_flat_range(piece.box, record.shape) is not None for piece in record.pieces)

    def runs(self, name: str, buffers: Iterator[Tensor]) -> Iterator[tuple[int, Tensor]]:
        """Yield the elements of a tensor in flat parts, piece by piece: (index of the first, values [elements]).

        Indices count in row-major order; values have the saved dtype, in the memory of their buffer. buffers: uint8
        tensors [bytes], each for one part, of a multiple of 8 bytes. A part is read before the hash of its piece has
        been checked: its values must be thrown away when this raises CheckpointError. Any rank may call alone.
        """
        record = self.manifest.tensors[name]
        dtype = getattr(torch, record.dtype)
        with file_layer.reading_ahead([self._span(piece) for piece in record.pieces]) as open_file:
            for piece in record.pieces:
                first_element, _ = contiguous_flat_range(piece.box, record.shape)
                next_buffer = lambda position, bytes_left: next(buffers)[:bytes_left]  # noqa: E731
                for position, data in self._read(piece, name, next_buffer, open_file):
                    yield first_element + position // dtype.itemsize, data.view(dtype)  # [elements of this part]

    def _check(self, tensors: dict[str, LocalTensor], convert: bool) -> None:
        """Raise one error with all missing tensors and mismatches, before anything is read."""
        problems = problems_of_tensors(tensors)
        for name, local in tensors.items():
            record = self.manifest.tensors.get(name)
            if record is None:
                problems.append(f"has no tensor {name!r}")
            elif record.shape != tuple(local.shape):
                problems.append(f"has tensor {name!r} of shape {record.shape}, the model's is {tuple(local.shape)}")
            elif record.dtype != local.dtype:
                is_convertible = _are_floating(record.dtype, local.dtype)
                if not (convert and is_convertible):
                    hint = "; convert=True allows it" if is_convertible else ""
                    problems.append(f"has tensor {name!r} in {record.dtype}, the model's is {local.dtype}{hint}")
        if problems:
            raise CheckpointError(self.folder, problems, "load it with the settings of the model that was saved")

    def _fill(self, tensors: dict[str, LocalTensor], in_place: bool) -> None:
        # find the saved pieces that overlap this rank's tensors, in file order: each file is read sequentially
        reads = []
        for name, local in tensors.items():
            for piece in self.manifest.tensors[name].pieces:
                overlaps = _overlaps(piece.box, local)
                if overlaps:
                    reads.append((piece, name, overlaps))
        reads.sort(key=lambda read: (read[0].file, read[0].offset))

        # choose where each piece is read to: into the tensor itself, or into one buffer for the largest of the others
        targets: list[Tensor | None] = []
        largest = 0
        for piece, name, overlaps in reads:
            target = None
            if in_place and len(overlaps) == 1:
                target = _direct_target(piece, self.manifest.tensors[name].dtype, *overlaps[0])
            if target is None:
                largest = max(largest, piece.nbytes)
            targets.append(target)
        buffer = torch.empty(largest, dtype=torch.uint8)

        # read each piece, check it, and copy the overlaps from the buffer
        with file_layer.reading_ahead([self._span(piece) for piece, _, _ in reads]) as open_file:
            for (piece, name, overlaps), target in zip(reads, targets):
                data = buffer[: piece.nbytes] if target is None else target  # [bytes of the piece]
                next_chunk = lambda position, bytes_left, data=data: data[position : position + _CHUNK]  # noqa: E731
                for _ in self._read(piece, name, next_chunk, open_file):
                    pass
                if target is None:
                    saved = data.view(getattr(torch, self.manifest.tensors[name].dtype))  # [elements]
                    saved = saved.view(size_of(piece.box))  # [shape of the piece's box]
                    _copy_overlaps(saved, overlaps)

    @cached_property
    def _gaps(self) -> dict[tuple[str, int], int]:
        return manifest_format.byte_gaps_in_files(self.manifest)

    def _span(self, piece: Piece) -> FileSpan:
        """Return the bytes of a piece, with the zeros before it that align it."""
        start = piece.offset - self._gaps[piece.file, piece.offset]
        return FileSpan(self.folder / piece.file, start, piece.offset + piece.nbytes)

    def _read(
        self,
        piece: Piece,
        name: str,
        buffer_for: Callable[[int, int], Tensor],
        open_file: Callable[[Path, int], BinaryIO],
    ) -> Iterator[tuple[int, Tensor]]:
        """Read a piece into `buffer_for(position, bytes left)`, part by part; yield (position, the bytes read).

        Raises CheckpointError at the end if its hash differs, or if the bytes that align it are not zeros.
        """
        path = self.folder / piece.file
        gap = self._gaps[piece.file, piece.offset]
        what = f"tensor {name!r}, box {manifest_format.show_box(piece.box)}"
        digest = hashlib.sha256()
        position = 0
        try:
            with open_file(path, piece.offset - gap) as file:
                zeros = bytearray(max(gap, 0))
                count = file_layer.read_all(file, memoryview(zeros), path)
                is_padded = count == len(zeros) and not any(zeros)
                while position < piece.nbytes:
                    data = buffer_for(position, piece.nbytes - position)
                    buffer = memoryview(data.numpy())
                    count = file_layer.read_all(file, buffer, path)
                    if count < len(buffer):
                        wrong = f"ends before the last {piece.nbytes - position - count} bytes of {what}"
                        raise CheckpointError(path, wrong, manifest_format.DAMAGED)
                    digest.update(buffer)
                    yield position, data
                    position += count
        except OSError as error:
            raise CheckpointError(
                path, f"cannot be read ({error}) for {what}", manifest_format.advice_after(error)
            ) from error
        if not is_padded:
            wrong = f"is not zero in the {gap} bytes before byte {piece.offset}, which align {what}"
            raise CheckpointError(path, wrong, manifest_format.DAMAGED)
        if digest.hexdigest() != piece.sha256:
            raise CheckpointError(path, f"does not match the sha256 of {what}", manifest_format.DAMAGED)


# (box in the saved piece, region of this rank's tensor, box in the region)
_Overlap = tuple[Box, Stored, Box]


def _overlaps(saved: Box, local: LocalTensor) -> list[_Overlap]:
    """Return the overlaps of this rank's pieces and copies with a saved piece."""
    overlaps = []
    for piece in (*local.pieces, *local.copies):
        global_box = piece[0]
        common = intersect(saved, global_box)
        if common is not None:
            overlaps.append((relative_to(common, saved), local.region(piece), relative_to(common, global_box)))
    return overlaps


def _copy_overlaps(saved: Tensor, overlaps: list[_Overlap]) -> None:
    """Copy the overlaps from a saved piece [shape of its box] to this rank's regions."""
    for source, region, target in overlaps:
        if isinstance(region, StoredTensor):
            region.put(target, saved[slices(source)])
        else:
            region[slices(target)].copy_(saved[slices(source)])


def _direct_target(piece: Piece, dtype: str, source: Box, region: Stored, target: Box) -> Tensor | None:
    """Return the memory of this rank's tensor, in bytes, if it has the piece just as the file.

    None if it must be copied.
    """
    if isinstance(region, StoredTensor) or source != whole(size_of(piece.box)):
        return None
    memory = region[slices(target)]  # [shape of the piece's box]
    if memory.device.type != "cpu" or memory.dtype != getattr(torch, dtype) or not memory.is_contiguous():
        return None
    return memory.view(-1).view(torch.uint8)  # [bytes]


def _are_floating(*dtypes: str) -> bool:
    return all("float" in dtype for dtype in dtypes)


# ---------------------------------------------------------------- finding it


def open_checkpoint(
    root: Path | str, iteration: int | None = None, world: Axis = ALONE, device: torch.device | str = "cpu"
) -> Checkpoint:
    """Open the checkpoint of `iteration` below `root`, by default the latest; check its manifest, read no tensors.

    Every rank of `world` must call. The first rank reads the manifest for all, so that they agree on the iteration.
    Raises CheckpointError.
    """
    # the first rank chooses the iteration and reads its manifest
    message = None
    with collectives.raise_together(world, device):
        if world.is_first:
            try:
                choice = checkpoint_folder.find(path_of(root), iteration)
            except OSError as error:
                advice = "check the path and who may read it"
                raise CheckpointError(root, f"cannot be read ({error})", advice) from error
            head = json.dumps([choice.folder.name, choice.warning])
            message = f"{head}\n{checkpoint_folder.read_manifest(choice.folder)}"

    # every rank parses it
    head, text = collectives.broadcast_text(message, world, device).split("\n", 1)
    name, warning = json.loads(head)
    folder = path_of(root) / name
    with collectives.raise_together(world, device):
        manifest = manifest_format.parse_manifest(text, folder / manifest_format.MANIFEST)
        manifest_format.check_complete(manifest, folder / manifest_format.MANIFEST)
        if world.is_first:
            checkpoint_folder.check_files(folder, manifest)
    return Checkpoint(folder, manifest, warning)
