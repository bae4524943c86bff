"""Loading: a rank intersects the boxes of its own tensors with those on disk, whatever layout wrote them.

    checkpoint = open_checkpoint(root, world=world)       the latest, or iteration=100
    checkpoint.state, checkpoint.names
    checkpoint.read_into(tensors, world)                  fills this rank's tensors

A rank reads only pieces that it needs something of, each once, whole, and checked against its hash before it is used.
"""

import hashlib
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.core import comm
from megatron.core.boxes import Box, intersect, relative_to, size_of, slices
from megatron.core.checkpoint import format
from megatron.core.checkpoint.format import CheckpointError, Manifest, Piece
from megatron.core.checkpoint.local_tensor import LocalTensor, problems_of
from megatron.core.grid import ALONE, Axis
from megatron.core.offload.tier import Stored, StoredTensor

_CHUNK = 16 << 20  # bytes read and hashed at a time, while they are in the cache


@dataclass(frozen=True)
class Checkpoint:
    """One saved iteration, its manifest read and checked."""

    folder: Path
    manifest: Manifest

    @property
    def iteration(self) -> int:
        return self.manifest.iteration

    @property
    def state(self) -> dict[str, Any]:
        return self.manifest.state

    @property
    def names(self) -> list[str]:
        """Of all tensors, in the order in which they were saved."""
        return list(self.manifest.tensors)

    def read_into(
        self,
        tensors: dict[str, LocalTensor],
        world: Axis = ALONE,
        *,
        convert: bool = False,
        device: torch.device | str = "cpu",
    ) -> None:
        """Fill what `tensors` hold of each tensor; padding keeps its values. `is_writer` plays no part.

        Every rank of `world` must call, and all raise if one fails; the tensors may then be partly filled. Without
        `world`, a rank is by itself. `convert` allows one floating dtype to become another (bfloat16 to float32). Names
        in the checkpoint that `tensors` lacks are passed over: compare with `names`. Needs host memory for the largest
        piece, once.
        """
        with comm.together(world, device):
            self._check(tensors, convert)
            with torch.no_grad():
                self._fill(tensors)

    def _check(self, tensors: dict[str, LocalTensor], convert: bool) -> None:
        """All that is missing or does not fit, in one error, before anything is read."""
        problems = [problem for name, local in tensors.items() for problem in problems_of(name, local)]
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

    def _fill(self, tensors: dict[str, LocalTensor]) -> None:
        wanted = [
            (piece, name, parts)
            for name, local in tensors.items()
            for piece in self.manifest.tensors[name].pieces
            if (parts := _parts(piece.box, local))
        ]
        wanted.sort(key=lambda want: (want[0].file, want[0].offset))  # forward through each file
        room = torch.empty(max((piece.nbytes for piece, _, _ in wanted), default=0), dtype=torch.uint8)
        for piece, name, parts in wanted:
            data = room[: piece.nbytes]
            self._read(piece, name, data)
            saved = data.view(getattr(torch, self.manifest.tensors[name].dtype)).view(size_of(piece.box))
            for source, region, target in parts:
                if isinstance(region, StoredTensor):
                    region.put(target, saved[slices(source)])
                else:
                    region[slices(target)].copy_(saved[slices(source)])

    def _read(self, piece: Piece, name: str, data: Tensor) -> None:
        """Fill `data` with the bytes of `piece`; raises if they are not the ones that were saved."""
        path = self.folder / piece.file
        what = f"tensor {name!r}, box {format.show(piece.box)}"
        buffer, at, digest = memoryview(data.numpy()), 0, hashlib.sha256()
        try:
            with open(path, "rb", buffering=0) as file:
                file.seek(piece.offset)
                while at < piece.nbytes and (count := file.readinto(buffer[at : at + _CHUNK])):
                    digest.update(buffer[at : at + count])
                    at += count
        except OSError as error:
            advice = "every rank must see the folder; is it on a file system that all ranks share?"
            raise CheckpointError(path, f"cannot be read ({error}) for {what}", advice) from error
        if at < piece.nbytes:
            raise CheckpointError(path, f"ends before the last {piece.nbytes - at} bytes of {what}", format.DAMAGED)
        if digest.hexdigest() != piece.sha256:
            raise CheckpointError(path, f"does not match the sha256 of {what}", format.DAMAGED)


def _parts(saved: Box, local: LocalTensor) -> list[tuple[Box, Stored, Box]]:
    """What `local` needs of a saved piece: (box within the piece, what it goes into, box within that)."""
    shared = ((intersect(saved, piece[0]), piece) for piece in (*local.pieces, *local.copies))
    return [
        (relative_to(box, saved), local.region(piece), relative_to(box, piece[0]))
        for box, piece in shared
        if box is not None
    ]


def _are_floating(*dtypes: str) -> bool:
    return all("float" in dtype for dtype in dtypes)


# ---------------------------------------------------------------- finding it


def open_checkpoint(
    root: Path | str,
    iteration: int | None = None,
    world: Axis = ALONE,
    device: torch.device | str = "cpu",
) -> Checkpoint:
    """The checkpoint of `iteration` below `root`, by default the latest. No tensor is read yet.

    Every rank of `world` must call; its first rank reads the manifest for all, so that they agree on which one it is.
    """
    found = None
    with comm.together(world, device):
        if world.is_first:
            folder = _find(Path(root), iteration)
            found = f"{folder.name}\n{_read_manifest(folder / format.MANIFEST)}"
    name, text = comm.broadcast_text(found, world, device).split("\n", 1)
    folder = Path(root) / name
    with comm.together(world, device):
        manifest = format.parse_manifest(text, folder / format.MANIFEST)
        format.check_whole(manifest, folder / format.MANIFEST)
        if world.is_first:
            _check_folder(folder, manifest)
    return Checkpoint(folder, manifest)


def _find(root: Path, iteration: int | None) -> Path:
    if not root.is_dir():
        raise CheckpointError(root, "is not a folder", f"give --load the folder that holds {format.LATEST}")
    if iteration is None:
        iteration = _latest(root)
    final = root / format.folder_name(iteration)
    for folder in (final, root / (final.name + format.REPLACED)):  # the second: killed while it was saved again
        if (folder / format.MANIFEST).is_file():
            return folder
    if final.is_dir():
        advice = "if it is of another format, convert it; else load another iteration"
        raise CheckpointError(final, f"has no {format.MANIFEST}", advice)
    raise CheckpointError(final, "does not exist", _which(root))


def _latest(root: Path) -> int:
    path = root / format.LATEST
    if not path.is_file():
        raise CheckpointError(root, f"holds no {format.LATEST}, so no checkpoint was finished in it", _which(root))
    text = path.read_text(errors="replace").strip()
    if not re.fullmatch("[0-9]{1,18}", text):
        raise CheckpointError(path, f"says {text!r:.60}, not the number of an iteration", _which(root))
    return int(text)


def _which(root: Path) -> str:
    there = ", ".join(str(number) for number in format.saved_iterations(root))
    return f"name one of the iterations that are there: {there}" if there else "no iteration is there; check the path"


def _read_manifest(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(path, f"cannot be read ({error})", format.DAMAGED) from error


def _check_folder(folder: Path, manifest: Manifest) -> None:
    """The folder is the one that the manifest speaks of, and its files are whole."""
    if format.iteration_of(folder.name.removesuffix(format.REPLACED)) != manifest.iteration:
        raise CheckpointError(folder, f"holds iteration {manifest.iteration}", "give the folder its old name back")
    problems = []
    for name, expected in manifest.files.items():
        found = (folder / name).stat().st_size if (folder / name).is_file() else None
        if found != expected:
            problems.append(f"{name} " + ("is missing" if found is None else f"has {found} bytes, not {expected}"))
    if problems:
        raise CheckpointError(folder, problems, format.DAMAGED)
