"""Writing and publishing a checkpoint: every rank writes its pieces into one raw file, rank 0 the manifest. No torch.

    all ranks   check tensors                              rank 0 clears what a killed save left, makes iter_N.partial/
    all ranks   iter_N.partial/rank_R.bin and rank_R.json  pieces, and what they are
    rank 0      manifest.json from all rank_R.json         nothing missing, nothing twice, no gap
    all ranks   is every tensor I hold in it?
    rank 0      rename to iter_N/, then point latest_checkpointed_iteration.txt to it, then remove what it replaces

(In an object store, which renames nothing, pieces and manifest have other places and the same order:
`object_store_commit.py`.)

Each line is one step of an `Agreement`: a rank that fails stops all of them with its message, and the checkpoint before
stays
what `latest` names. All ranks write below one folder, so it must lie on a file system that they share; a rank that does
not see it, or whose files rank 0 does not see, is reported. One job at a time may save below a root: the caller sees to it.

The ranks that train run these steps (`save_sharded.py`), or a process beside each of them (`writer.py`).
"""

import contextlib
import hashlib
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from megatron.core.dist_checkpointing import checkpoint_folder, commit, format
from megatron.core.dist_checkpointing.format import CheckpointError, Manifest, Piece, TensorRecord
from megatron.core.sharding.boxes import Box
from megatron.core.storage import file_layer

ONE_WRITER = "exactly one rank must be the writer of every element"
_NOT_SHARED = "the folder must be on a file system that all ranks share; choose another --save"


class Agreement(Protocol):
    """How the ranks of a save agree. Every rank makes the same calls in the same order."""

    rank: int

    def together(self) -> contextlib.AbstractContextManager[None]:
        """A block that may fail on some ranks only: if it fails anywhere, every rank raises."""
        ...

    def gather(self, number: int) -> list[int]:
        """The numbers of all ranks, in their order."""
        ...

    def first_says(self, text: str | None) -> str:
        """The text of the first rank, on every rank."""
        ...


@dataclass(frozen=True)
class HeldPart:
    """What one rank holds of a tensor, in host memory or to be brought there piece by piece."""

    dtype: str
    shape: tuple[int, ...]  # of the whole tensor
    is_writer: bool
    pieces: list[tuple[Box, Callable[[], Iterable[Any]]]]  # the elements of a box in row-major order, as buffers


@dataclass(frozen=True)
class Saving:
    """One save, as every rank knows it."""

    root: Path
    iteration: int
    state: dict[str, Any]  # plain JSON; that of the first rank counts
    warn: Callable[[str], object]  # told, on the first rank, of what could not be removed

    @property
    def partial(self) -> Path:
        return self.root / (format.folder_name(self.iteration) + format.PARTIAL)


def write_and_publish(saving: Saving, parts: dict[str, HeldPart], ranks: Agreement) -> None:
    """All steps of a save. On return, on any rank, the checkpoint is on disk and is the latest; if a rank fails, all
    raise."""
    try:
        with saving_together(saving.root, ranks):
            if ranks.rank == 0:
                _start(saving)
        write(saving, parts, ranks)
        make_latest(saving, ranks)
    except Exception:
        if ranks.rank == 0:
            with contextlib.suppress(OSError):  # the first error is the one to report
                commit.clear_leftovers(saving.root)
        raise


@contextlib.contextmanager
def saving_together(root: Path, ranks: Agreement) -> Iterator[None]:
    """A step of saving: a failure says what there is to go on from."""
    with ranks.together():
        try:
            yield
        except CheckpointError as error:
            raise CheckpointError(error.file, error.wrong, f"{error.advice}; {_left(root)}") from error.__cause__


def _left(root: Path) -> str:
    try:
        iteration = checkpoint_folder.find(root).iteration
    except (CheckpointError, OSError):
        return f"there is no checkpoint in {root} yet"
    return f"the checkpoint before is intact (iteration {iteration})"


# ---------------------------------------------------------------- before: an empty folder


def _start(saving: Saving) -> None:
    """An empty folder to write into."""
    root, partial = saving.root, saving.partial
    final = root / partial.name.removesuffix(format.PARTIAL)
    with _writing(partial):
        file_layer.make_folders(root)
        _clear_leftovers(saving)
        if file_layer.exists(final) and not commit.is_ours(final):
            wrong = f"exists and has no {format.MANIFEST}, so it is not ours to replace"
            raise CheckpointError(final, wrong, "move it away or choose another --save")
        commit.begin(partial)


def _clear_leftovers(saving: Saving) -> None:
    for problem in commit.clear_leftovers(saving.root):
        saving.warn(problem)


# ---------------------------------------------------------------- every rank: its pieces


def write(saving: Saving, parts: dict[str, HeldPart], ranks: Agreement) -> None:
    """Every rank writes what it is the writer of; rank 0 writes the manifest of all, in which each rank finds what it
    holds."""
    partial = saving.partial
    with saving_together(saving.root, ranks):
        part_bytes = _write_part(partial, saving.iteration, ranks.rank, parts)
    all_part_bytes = ranks.gather(part_bytes)
    summary = None
    with saving_together(saving.root, ranks):
        if ranks.rank == 0:
            with _writing(partial):
                manifest = _merge(partial, saving.iteration, saving.state, all_part_bytes)
            summary = json.dumps({name: [rec.dtype, rec.shape] for name, rec in manifest.tensors.items()})
    summary = ranks.first_says(summary)
    with saving_together(saving.root, ranks):
        _check_nothing_lost(partial, parts, json.loads(summary))


def _write_part(partial: Path, iteration: int, rank: int, parts: dict[str, HeldPart]) -> int:
    """Write what this rank is the writer of; the bytes of the list of it, 0 when there is nothing."""
    mine = {name: part for name, part in parts.items() if part.is_writer}
    if not mine:
        return 0
    with _writing(partial):
        try:
            path = commit.file_for(partial, rank)
        except FileNotFoundError as error:
            wrong = f"was made by the first rank but is not visible to rank {rank}"
            raise CheckpointError(partial, wrong, _NOT_SHARED) from error
    with _writing(path):
        records, nbytes = _write_pieces(path, mine)
        text = format.to_json(Manifest(iteration, {}, {path.name: nbytes} if nbytes else {}, records))
        file_layer.write_synced(partial / format.file_name(rank, ".json"), text)
        file_layer.at(partial).sync_folder(partial)
    return len(text)


def _write_pieces(path: Path, parts: dict[str, HeldPart]) -> tuple[dict[str, TensorRecord], int]:
    """The records of the pieces written to `path`, and its size; no file is made for no pieces."""
    records = {name: TensorRecord(part.dtype, part.shape, ()) for name, part in parts.items()}
    if not any(part.pieces for part in parts.values()):
        return records, 0
    # x: a file that is there belongs to another job that saves here.
    with file_layer.at(path).open(path, "xb") as file:
        for name, part in parts.items():
            pieces = tuple(_write_piece(file, path, box, buffers()) for box, buffers in part.pieces)
            records[name] = TensorRecord(part.dtype, part.shape, pieces)
        nbytes = file.tell()
        file_layer.at(path).sync(file)
    return records, nbytes


def _write_piece(file: BinaryIO, path: Path, box: Box, buffers: Iterable[Any]) -> Piece:
    file_layer.write_all(file, bytes(-file.tell() % format.ALIGNMENT), path)
    offset, digest = file.tell(), hashlib.sha256()
    for data in buffers:
        # Hashed while it passes: reading it back would double the time of a save.
        digest.update(data)
        file_layer.write_all(file, data, path)
    return Piece(box, path.name, offset, file.tell() - offset, digest.hexdigest())


# ---------------------------------------------------------------- rank 0: the manifest


def _merge(partial: Path, iteration: int, state: dict[str, Any], part_bytes: list[int]) -> Manifest:
    """Write the manifest of the pieces of all ranks that wrote `part_bytes` of list, each found whole."""
    merged = Manifest(iteration, state, {}, {})
    names = [format.file_name(rank, ".json") for rank, nbytes in enumerate(part_bytes) if nbytes]
    _check_sizes(partial, dict(zip(names, filter(None, part_bytes))))
    for name, nbytes in zip(names, filter(None, part_bytes)):
        part = format.parse_manifest(file_layer.read_start(partial / name, nbytes).decode(), partial / name)
        merged.files.update(part.files)
        _add(merged.tensors, part.tensors, partial / name)
    _check_sizes(commit.folder_of_pieces(partial), merged.files)
    format.check_whole(merged, partial, ONE_WRITER)
    text = format.to_json(merged)
    format.parse_manifest(text, partial / format.MANIFEST)  # what cannot be read must not become the latest
    with _writing(partial / format.MANIFEST):
        file_layer.write_synced(partial / format.MANIFEST, text)
        for name in names:
            # The manifest lists the same pieces; two lists could disagree.
            file_layer.at(partial).remove(partial / name)
        file_layer.at(partial).sync_folder(partial)
    return merged


def _check_sizes(where: Path, expected: dict[str, int]) -> None:
    for name, found in file_layer.sizes_of(where, expected).items():
        if found != expected[name]:
            wrong = "is not there" if found is None else f"has {found} bytes"
            told = f"{wrong}, though its rank wrote {expected[name]} bytes"
            raise CheckpointError(where / name, told, _NOT_SHARED)


def _add(merged: dict[str, TensorRecord], part: dict[str, TensorRecord], file: Path) -> None:
    for name, record in part.items():
        known = merged.get(name, TensorRecord(record.dtype, record.shape, ()))
        if (known.dtype, known.shape) != (record.dtype, record.shape):
            earlier = f"an earlier rank as {known.dtype} {known.shape}"
            wrong = f"has tensor {name!r} as {record.dtype} {record.shape}, {earlier}"
            raise CheckpointError(file, wrong, "two different tensors share a name, or ranks disagree")
        merged[name] = TensorRecord(known.dtype, known.shape, known.pieces + record.pieces)


def _check_nothing_lost(partial: Path, parts: dict[str, HeldPart], saved: dict[str, list]) -> None:
    """A tensor that no rank is the writer of would be missed only when it is loaded."""
    problems = [
        f"tensor {name!r}, {part.dtype} {part.shape}, "
        + (f"was saved as {saved[name][0]} {tuple(saved[name][1])}" if name in saved else "has no rank that writes it")
        for name, part in parts.items()
        if saved.get(name) != [part.dtype, list(part.shape)]
    ]
    if problems:
        raise CheckpointError(partial, problems, ONE_WRITER)


@contextlib.contextmanager
def _writing(path: Path) -> Iterator[None]:
    """A full or broken disk, said of `path`."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(path, f"cannot be written ({error})", "free or choose another disk") from error


# ---------------------------------------------------------------- rank 0: the latest


def make_latest(saving: Saving, ranks: Agreement) -> None:
    """Makes the folder that was written the latest checkpoint, and removes what it replaces."""
    with saving_together(saving.root, ranks):
        if ranks.rank == 0:
            with _writing(saving.partial.with_suffix("")):
                commit.publish(saving.partial, saving.iteration)
            _clear_leftovers(saving)
