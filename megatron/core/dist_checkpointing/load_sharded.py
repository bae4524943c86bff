"""Loading: each rank intersects the boxes of its tensors with the saved boxes, whatever layout wrote them.

    checkpoint = open_checkpoint(root, world=world)       the latest, or iteration=100
    checkpoint.state, checkpoint.names
    checkpoint.read_into(tensors, world)                  fills this rank's tensors

A rank reads only pieces that overlap its tensors, each once and whole, and checks the hash before it uses the values.
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

from megatron.core.dist_checkpointing import checkpoint_folder as folder, format
from megatron.core.dist_checkpointing.format import CheckpointError, Manifest, Piece
from megatron.core.dist_checkpointing.local_tensor import LocalTensor, problems_of_tensors
from megatron.core.offload.stored_tensor import Stored, StoredTensor
from megatron.core.parallel import collectives
from megatron.core.parallel.grid import ALONE, Axis
from megatron.core.sharding.boxes import Box, contiguous_flat_range, intersect, relative_to, size_of, slices, whole
from megatron.core.storage import file_layer
from megatron.core.storage.paths import path_of
from megatron.core.storage.read_ahead import FileSpan

_CHUNK = 16 << 20  # bytes read and hashed at a time, while they are in the cache


@dataclass(frozen=True)
class Checkpoint:
    """One saved iteration, its manifest read and checked."""

    folder: Path
    manifest: Manifest
    warning: str = ""  # why the default choice of this iteration may surprise

    @property
    def iteration(self) -> int:
        return self.manifest.iteration

    @property
    def state(self) -> dict[str, Any]:
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
        """Reads the pieces and copies of `tensors`; padding keeps its values, and `is_writer` is ignored.

        Every rank of `world` must call; all raise if one fails, and tensors may then be partly filled. Default: this rank
        alone. convert: allows conversion between floating dtypes. Saved tensors that are not in `tensors` are ignored:
        compare
        `names`. Takes host memory for the largest piece. in_place: reads a piece that lies in a tensor as in its file
        into the
        tensor, without this memory; what is damaged is then in the tensor when this raises.
        """
        with collectives.raise_together(world, device):
            self._check(tensors, convert)
            with torch.no_grad():
                self._fill(tensors, in_place)

    def has_runs(self, name: str) -> bool:
        """Whether `runs` can give this tensor: its pieces have whole rows, or elements of one."""
        record = self.manifest.tensors[name]
        return all(contiguous_flat_range(piece.box, record.shape) is not None for piece in record.pieces)

    def runs(self, name: str, rooms: Iterator[Tensor]) -> Iterator[tuple[int, Tensor]]:
        """The elements of a tensor in flat parts: (the number of the first in row-major order, values), piece by piece.

        rooms: memory for one part each, in bytes, a multiple of 8. A part is read before the hash of its piece has been
        checked:
        what was made of it must be thrown away when this raises.
        """
        record = self.manifest.tensors[name]
        dtype = getattr(torch, record.dtype)
        with file_layer.reading_ahead([self._span(piece) for piece in record.pieces]) as opened:
            for piece in record.pieces:
                start, _ = contiguous_flat_range(piece.box, record.shape)
                for at, data in self._read(piece, name, lambda at, left: next(rooms)[:left], opened):
                    yield start + at // dtype.itemsize, data.view(dtype)

    def _check(self, tensors: dict[str, LocalTensor], convert: bool) -> None:
        """Raises one error with all missing tensors and mismatches, before anything is read."""
        problems = problems_of_tensors(tensors)
        for name, local in tensors.items():
            record = self.manifest.tensors.get(name)
            if record is None:
                problems.append(f"has no tensor {name!r}")
            elif record.shape != tuple(local.shape):
                problems.append(f"has tensor {name!r} of shape {record.shape}, the model's is {tuple(local.shape)}")
            elif record.dtype != local.dtype and not (convert and _are_floating(record.dtype, local.dtype)):
                allowed = "; convert=True allows it" if _are_floating(record.dtype, local.dtype) else ""
                problems.append(f"has tensor {name!r} in {record.dtype}, the model's is {local.dtype}{allowed}")
        if problems:
            raise CheckpointError(self.folder, problems, "load it with the settings of the model that was saved")

    def _fill(self, tensors: dict[str, LocalTensor], in_place: bool) -> None:
        wanted = [
            (piece, name, parts)
            for name, local in tensors.items()
            for piece in self.manifest.tensors[name].pieces
            if (parts := _parts(piece.box, local))
        ]
        wanted.sort(key=lambda want: (want[0].file, want[0].offset))  # sequential reads of each file
        direct = [
            _place_of_whole(piece, self.manifest.tensors[name].dtype, *parts[0])
            if in_place and len(parts) == 1
            else None
            for piece, name, parts in wanted
        ]
        largest = max((piece.nbytes for (piece, _, _), place in zip(wanted, direct) if place is None), default=0)
        room = torch.empty(largest, dtype=torch.uint8)
        with file_layer.reading_ahead([self._span(piece) for piece, _, _ in wanted]) as opened:
            for (piece, name, parts), place in zip(wanted, direct):
                data = room[: piece.nbytes] if place is None else place
                for _ in self._read(piece, name, lambda at, left, data=data: data[at : at + _CHUNK], opened):
                    pass
                if place is None:
                    saved = data.view(getattr(torch, self.manifest.tensors[name].dtype)).view(size_of(piece.box))
                    _put(saved, parts)

    @cached_property
    def _gaps(self) -> dict[tuple[str, int], int]:
        return format.gaps_of(self.manifest)

    def _span(self, piece: Piece) -> FileSpan:
        """The bytes of a piece, and those before it that align it."""
        start = piece.offset - self._gaps[piece.file, piece.offset]
        return FileSpan(self.folder / piece.file, start, piece.offset + piece.nbytes)

    def _read(
        self, piece: Piece, name: str, room: Callable[[int, int], Tensor], opened: Callable[[Path, int], BinaryIO]
    ) -> Iterator[tuple[int, Tensor]]:
        """Reads a piece into `room(first byte, bytes left)`, part by part: (first byte, bytes read).

        CheckpointError at the end if its hash differs, or the zeros that align it.
        """
        path, gap = self.folder / piece.file, self._gaps[piece.file, piece.offset]
        what = f"tensor {name!r}, box {format.show_box(piece.box)}"
        digest, at = hashlib.sha256(), 0
        try:
            with opened(path, piece.offset - gap) as file:
                zeros = bytearray(max(gap, 0))
                is_padded = file_layer.read_all(file, memoryview(zeros), path) == len(zeros) and not any(zeros)
                while at < piece.nbytes:
                    data = room(at, piece.nbytes - at)
                    buffer = memoryview(data.numpy())
                    if (count := file_layer.read_all(file, buffer, path)) < len(buffer):
                        wrong = f"ends before the last {piece.nbytes - at - count} bytes of {what}"
                        raise CheckpointError(path, wrong, format.DAMAGED)
                    digest.update(buffer)
                    yield at, data
                    at += count
        except OSError as error:
            raise CheckpointError(path, f"cannot be read ({error}) for {what}", format.advice_after(error)) from error
        if not is_padded:
            wrong = f"is not zero in the {gap} bytes before byte {piece.offset}, which align {what}"
            raise CheckpointError(path, wrong, format.DAMAGED)
        if digest.hexdigest() != piece.sha256:
            raise CheckpointError(path, f"does not match the sha256 of {what}", format.DAMAGED)


def _parts(saved: Box, local: LocalTensor) -> list[tuple[Box, Stored, Box]]:
    """The overlap of `local` with a saved piece: (box in the piece, target region, box in the region)."""
    parts = []
    for piece in (*local.pieces, *local.copies):
        if (box := intersect(saved, piece[0])) is not None:
            parts.append((relative_to(box, saved), local.region(piece), relative_to(box, piece[0])))
    return parts


def _put(saved: Tensor, parts: list[tuple[Box, Stored, Box]]) -> None:
    """Copies parts of a piece to where they belong."""
    for source, region, target in parts:
        if isinstance(region, StoredTensor):
            region.put(target, saved[slices(source)])
        else:
            region[slices(target)].copy_(saved[slices(source)])


def _place_of_whole(piece: Piece, dtype: str, source: Box, region: Stored, target: Box) -> Tensor | None:
    """The bytes of this rank's memory where the whole piece belongs as it lies in the file; None if it must be copied
    there."""
    if isinstance(region, StoredTensor) or source != whole(size_of(piece.box)):
        return None
    place = region[slices(target)]
    if place.device.type != "cpu" or place.dtype != getattr(torch, dtype) or not place.is_contiguous():
        return None
    return place.view(-1).view(torch.uint8)


def _are_floating(*dtypes: str) -> bool:
    return all("float" in dtype for dtype in dtypes)


# ---------------------------------------------------------------- finding it


def open_checkpoint(
    root: Path | str, iteration: int | None = None, world: Axis = ALONE, device: torch.device | str = "cpu"
) -> Checkpoint:
    """The checkpoint of `iteration` below `root`, by default the latest, with its manifest checked; reads no tensors.

    Every rank of `world` must call. The first rank reads the manifest for all, so that they agree on the iteration.
    """
    found = None
    with collectives.raise_together(world, device):
        if world.is_first:
            try:
                choice = folder.find(path_of(root), iteration)
            except OSError as error:
                advice = "check the path and who may read it"
                raise CheckpointError(root, f"cannot be read ({error})", advice) from error
            found = f"{json.dumps([choice.folder.name, choice.warning])}\n{folder.read_manifest(choice.folder)}"
    head, text = collectives.broadcast_text(found, world, device).split("\n", 1)
    name, warning = json.loads(head)
    path = path_of(root) / name
    with collectives.raise_together(world, device):
        manifest = format.parse_manifest(text, path / format.MANIFEST)
        format.check_whole(manifest, path / format.MANIFEST)
        if world.is_first:
            folder.check_files(path, manifest)
    return Checkpoint(path, manifest, warning)
