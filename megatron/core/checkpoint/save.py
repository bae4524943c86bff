"""Saving: every rank writes its pieces into one raw file, rank 0 writes the manifest, and one rename makes it all real.

    all ranks   check tensors                              rank 0 clears what a killed save left, makes iter_N.partial/
    all ranks   iter_N.partial/rank_R.bin and rank_R.json  pieces, and what they are
    rank 0      manifest.json from all rank_R.json         nothing missing, nothing twice, no gap
    all ranks   is every tensor I hold in it?
    rank 0      rename to iter_N/, then point latest_checkpointed_iteration.txt to it, then remove what it replaces

Each line is one `comm.together`: a rank that fails stops all of them with its message, and the checkpoint before stays
what `latest` names. All ranks write below one folder, so it must lie on a file system that they share; a rank that does
not see it, or whose files rank 0 does not see, is reported. One job at a time may save below a root: the caller sees to it.
"""

import contextlib
import hashlib
import json
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from megatron.core import comm
from megatron.core.boxes import Box
from megatron.core.checkpoint import folder, format
from megatron.core.checkpoint.format import CheckpointError, Manifest, Piece, TensorRecord
from megatron.core.checkpoint.local_tensor import LocalTensor, problems_of_tensors
from megatron.core.grid import Axis
from megatron.core.storage import files
from megatron.core.storage.stored import Stored, StoredTensor

_CHUNK = 16 << 20  # bytes copied to the host, hashed and written at a time: all the memory that saving needs
_ONE_WRITER = "exactly one rank must be the writer of every element"
_NOT_SHARED = "the folder must be on a file system that all ranks share; choose another --save"


def save_checkpoint(
    root: Path | str,
    iteration: int,
    tensors: dict[str, LocalTensor],
    state: dict[str, Any],
    world: Axis,
    device: torch.device | str = "cpu",
    *,
    warn: Callable[[str], object] = warnings.warn,
) -> Path:
    """Save `tensors` and `state` as iteration `iteration` below `root`; returns the checkpoint's folder.

    Every rank of `world` must call, with the tensors that it holds itself; `state` is plain JSON, and that of the first
    rank counts. `device` is where the ranks' agreement communicates. On return, on any rank, the checkpoint is on disk
    and is the latest. If any rank fails, all raise, and `latest` names what it named before. A checkpoint of the same
    iteration is replaced. `warn` is told, on the first rank, of what could not be removed.
    """
    root = Path(root)
    partial = root / (format.folder_name(iteration) + format.PARTIAL)
    try:
        with _together(root, world, device):
            _check(root, iteration, tensors, state if world.is_first else {})
            if world.is_first:
                _start(root, partial, warn)
        with _together(root, world, device):
            part_bytes = _write_part(partial, iteration, world.rank, tensors)
        all_part_bytes = comm.all_gather(torch.tensor([part_bytes], device=device), world).tolist()
        summary = None
        with _together(root, world, device):
            if world.is_first:
                manifest = _merge(partial, iteration, state, all_part_bytes)
                summary = json.dumps({name: [rec.dtype, rec.shape] for name, rec in manifest.tensors.items()})
        summary = comm.broadcast_text(summary, world, device)
        with _together(root, world, device):
            _check_nothing_lost(partial, tensors, json.loads(summary))
        with _together(root, world, device):
            if world.is_first:
                with _writing(partial.with_suffix("")):
                    folder.publish(partial, iteration)
                _clear_leftovers(root, warn)
    except Exception:
        if world.is_first:
            with contextlib.suppress(OSError):  # the first error is the one to report
                folder.clear_leftovers(root)
        raise
    return root / format.folder_name(iteration)


@contextlib.contextmanager
def _together(root: Path, world: Axis, device: torch.device | str) -> Iterator[None]:
    """`comm.together` of a step of saving: a failure says what there is to go on from."""
    with comm.together(world, device):
        try:
            yield
        except CheckpointError as error:
            raise CheckpointError(error.file, error.wrong, f"{error.advice}; {_left(root)}") from error.__cause__


def _left(root: Path) -> str:
    try:
        iteration = folder.find(root).iteration
    except (CheckpointError, OSError):
        return f"there is no checkpoint in {root} yet"
    return f"the checkpoint before is intact (iteration {iteration})"


# ---------------------------------------------------------------- before: can it work?


def _check(root: Path, iteration: int, tensors: dict[str, LocalTensor], state: dict[str, Any]) -> None:
    problems = problems_of_tensors(tensors)
    problems += [f"a tensor is named {name!r}; names are text" for name in tensors if not isinstance(name, str)]
    problems += format.state_problems(state)
    if not isinstance(state, dict):
        problems.append(f"state is a {type(state).__name__}; it must be a dict")
    if iteration < 0:
        problems.append(f"iteration is {iteration!r}; it must be an integer from 0 up")
    if problems:
        raise CheckpointError(root, problems, "nothing was written")


def _start(root: Path, partial: Path, warn: Callable[[str], object]) -> None:
    """An empty folder to write into."""
    final = root / partial.name.removesuffix(format.PARTIAL)
    with _writing(partial):
        files.make_folders(root)
        _clear_leftovers(root, warn)
        if files.exists(final) and not files.is_file(final / format.MANIFEST):
            wrong = f"exists and has no {format.MANIFEST}, so it is not ours to replace"
            raise CheckpointError(final, wrong, "move it away or choose another --save")
        folder.make_way(partial)
        files.at(partial).make_folder(partial)


def _clear_leftovers(root: Path, warn: Callable[[str], object]) -> None:
    for problem in folder.clear_leftovers(root):
        warn(problem)


# ---------------------------------------------------------------- every rank: its pieces


def _write_part(partial: Path, iteration: int, rank: int, tensors: dict[str, LocalTensor]) -> int:
    """Write what this rank is the writer of; the bytes of the list of it, 0 when there is nothing."""
    mine = {name: local for name, local in tensors.items() if local.is_writer}
    if not mine:
        return 0
    if not files.is_folder(partial):
        raise CheckpointError(partial, f"was made by the first rank but is not visible to rank {rank}", _NOT_SHARED)
    path = partial / format.file_name(rank, ".bin")
    with _writing(path):
        records, nbytes = _write_pieces(path, mine)
        text = format.to_json(Manifest(iteration, {}, {path.name: nbytes} if nbytes else {}, records))
        files.write_synced(path.with_suffix(".json"), text)
        files.at(partial).sync_folder(partial)
    return len(text)


def _write_pieces(path: Path, tensors: dict[str, LocalTensor]) -> tuple[dict[str, TensorRecord], int]:
    """The records of the pieces written to `path`, and its size; no file is made for no pieces."""
    records = {name: TensorRecord(local.dtype, tuple(local.shape), ()) for name, local in tensors.items()}
    if not any(local.pieces for local in tensors.values()):
        return records, 0
    # x: a file that is there belongs to another job that saves here.
    with files.at(path).open(path, "xb") as file:
        for name, local in tensors.items():
            pieces = tuple(_write_piece(file, path, local, piece) for piece in local.pieces)
            records[name] = TensorRecord(local.dtype, tuple(local.shape), pieces)
        nbytes = file.tell()
        files.at(path).sync(file)
    return records, nbytes


def _write_piece(file: BinaryIO, path: Path, local: LocalTensor, piece: tuple[Box, Box]) -> Piece:
    files.write_all(file, bytes(-file.tell() % format.ALIGNMENT), path)
    offset, digest = file.tell(), hashlib.sha256()
    for chunk in _chunks(local.region(piece)):
        data = chunk.cpu().reshape(-1).view(torch.uint8).numpy().data
        # Hashed while it passes: reading it back would double the time of a save.
        digest.update(data)
        files.write_all(file, data, path)
    return Piece(piece[0], path.name, offset, file.tell() - offset, digest.hexdigest())


def _chunks(x: Stored) -> Iterator[Tensor]:
    """The elements of `x` in row-major order, as tensors of at most `_CHUNK` bytes: views, or made one by one."""
    if isinstance(x, StoredTensor):
        yield from (part.start_reading().wait() for part in x.parts(_CHUNK))
    elif x.nbytes <= _CHUNK:
        yield x
    elif rows := _CHUNK * len(x) // x.nbytes:
        yield from x.split(rows)
    else:  # even one row is too much
        for row in x:
            yield from _chunks(row)


# ---------------------------------------------------------------- rank 0: the manifest


def _merge(partial: Path, iteration: int, state: dict[str, Any], part_bytes: list[int]) -> Manifest:
    """Write the manifest of the pieces of all ranks that wrote `part_bytes` of list, each found whole."""
    merged = Manifest(iteration, state, {}, {})
    names = [format.file_name(rank, ".json") for rank, nbytes in enumerate(part_bytes) if nbytes]
    for name, nbytes in zip(names, filter(None, part_bytes)):
        _check_size(partial / name, nbytes)
        part = format.parse_manifest(files.read_start(partial / name, nbytes).decode(), partial / name)
        for file, size in part.files.items():
            _check_size(partial / file, size)
        merged.files.update(part.files)
        _add(merged.tensors, part.tensors, partial / name)
    format.check_whole(merged, partial, _ONE_WRITER)
    text = format.to_json(merged)
    format.parse_manifest(text, partial / format.MANIFEST)  # what cannot be read must not become the latest
    with _writing(partial / format.MANIFEST):
        files.write_synced(partial / format.MANIFEST, text)
        for name in names:
            # The manifest lists the same pieces; two lists could disagree.
            files.at(partial).remove(partial / name)
        files.at(partial).sync_folder(partial)
    return merged


def _check_size(path: Path, expected: int) -> None:
    found = folder.size_of_file(path)
    if found != expected:
        wrong = "is not there" if found is None else f"has {found} bytes"
        raise CheckpointError(path, f"{wrong}, though its rank wrote {expected} bytes", _NOT_SHARED)


def _add(merged: dict[str, TensorRecord], part: dict[str, TensorRecord], file: Path) -> None:
    for name, record in part.items():
        known = merged.get(name, TensorRecord(record.dtype, record.shape, ()))
        if (known.dtype, known.shape) != (record.dtype, record.shape):
            earlier = f"an earlier rank as {known.dtype} {known.shape}"
            wrong = f"has tensor {name!r} as {record.dtype} {record.shape}, {earlier}"
            raise CheckpointError(file, wrong, "two different tensors share a name, or ranks disagree")
        merged[name] = TensorRecord(known.dtype, known.shape, known.pieces + record.pieces)


def _check_nothing_lost(partial: Path, tensors: dict[str, LocalTensor], saved: dict[str, list]) -> None:
    """A tensor that no rank is the writer of would be missed only when it is loaded."""
    problems = [
        f"tensor {name!r}, {local.dtype} {tuple(local.shape)}, "
        + (f"was saved as {saved[name][0]} {tuple(saved[name][1])}" if name in saved else "has no rank that writes it")
        for name, local in tensors.items()
        if saved.get(name) != [local.dtype, list(local.shape)]
    ]
    if problems:
        raise CheckpointError(partial, problems, _ONE_WRITER)


@contextlib.contextmanager
def _writing(path: Path) -> Iterator[None]:
    """A full or broken disk, said of `path`."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(path, f"cannot be written ({error})", "free or choose another disk") from error
