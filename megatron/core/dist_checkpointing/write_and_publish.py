"""The steps of a save: every rank writes its pieces into one raw file, rank 0 writes and publishes the manifest.

No torch.

    all ranks   check tensors (the caller, before `write_and_publish`)
    rank 0      remove leftovers of killed saves, make iter_N.partial/
    all ranks   write iter_N.partial/rank_R.bin (the pieces) and rank_R.json (a manifest of these pieces); a rank that
                writes no tensor makes neither file
    rank 0      write manifest.json from all rank_R.json, after checking: nothing missing, nothing twice, no gap; then
                remove the rank_R.json
    all ranks   check that every tensor this rank holds is in the manifest
    rank 0      rename to iter_N/, point latest_checkpointed_iteration.txt to it, remove what it replaces: an earlier save
                of iteration N, which had made room by a rename. Other iterations are not touched

No file in iter_N.partial/ is written atomically, and none has to be: no load reads that folder, rank 0 reads each rank_R.json
only after the step that wrote it, and the two renames at the end publish the folder. Each file is on the disk before the step
that relies on it.

An object store cannot rename. There pieces and manifest have other places and the same order: `object_store_commit.py`.

Each line is one step of a `SaveGroup`, which no rank leaves before all have ended it: if a rank fails, all ranks stop with
its message, rank 0 removes iter_N.partial/ where it still has that name, and `latest` still names the previous checkpoint,
unless what fails comes after the pointer's rename (or the folder's, where the latest iteration is saved again). All ranks
write below one folder, so it must be on a file system that they share; a rank that does not see it, or whose files rank 0
does not see, is reported. One job at a time may save below a root; the caller ensures that.

The training ranks run these steps themselves (`save_sharded.py`), or a process beside each of them does
(`writer_process.py`).
"""

import contextlib
import hashlib
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from megatron.core.dist_checkpointing import checkpoint_folder, manifest_format, publish_by_rename_and_cleanup
from megatron.core.dist_checkpointing.manifest_format import CheckpointError, Manifest, Piece, TensorRecord
from megatron.core.sharding.boxes import Box
from megatron.core.storage import file_layer

ONE_WRITER = "exactly one rank must be the writer of every element"
_NOT_SHARED = "the folder must be on a file system that all ranks share; choose another --save"


class SaveGroup(Protocol):
    """The ranks of a save, as this rank reaches them. Every rank makes the same calls in the same order."""

    rank: int

    def together(self) -> contextlib.AbstractContextManager[None]:
        """Run a block that may fail on some ranks only: if it fails anywhere, every rank raises.

        Acts as a barrier at the end of the block. A rank that failed raises its own error, the others one with its message.
        """
        ...

    def gather(self, number: int) -> list[int]:
        """Return the numbers of all ranks, in rank order, on every rank."""
        ...

    def broadcast_from_first(self, text: str | None) -> str:
        """Return the text of the first rank, on every rank."""
        ...


@dataclass(frozen=True)
class TensorToWrite:
    """One rank's part of a tensor, in host memory or copied there piece by piece while it is written."""

    dtype: str
    shape: tuple[int, ...]  # of the global tensor
    is_writer: bool  # whether this rank writes any of it; else the tensor is listed only to be found in the manifest
    # a box of the global tensor, and a function that returns its elements in row-major order as buffers
    pieces: list[tuple[Box, Callable[[], Iterable[Any]]]]


@dataclass(frozen=True)
class SaveRequest:
    """One save, as every rank knows it."""

    root: Path
    iteration: int
    state: dict[str, Any]  # plain JSON; the first rank's is written
    warn: Callable[[str], object]  # called on the first rank with what could not be removed

    @property
    def partial(self) -> Path:
        """The folder that is written before the checkpoint has its name."""
        return self.root / (manifest_format.folder_name(self.iteration) + manifest_format.PARTIAL)


def write_and_publish(request: SaveRequest, items: dict[str, TensorToWrite], ranks: SaveGroup) -> None:
    """Run all steps of a save. Every rank must call.

    items: name -> this rank's part of every tensor that it holds. When this returns on any rank, the checkpoint is on disk
    and is the latest. If a rank fails, all raise.
    """
    try:
        with save_step(request.root, ranks):
            if ranks.rank == 0:
                _make_empty_folder(request)
        write_pieces_and_manifest(request, items, ranks)
        make_latest(request, ranks)
    except Exception:
        if ranks.rank == 0:
            # Remove iter_N.partial/. If an earlier save of iteration N was renamed and nothing took its place, it gets its
            # name back. What cannot be removed stays for the next save.
            with contextlib.suppress(OSError):  # the first error is the one to report
                publish_by_rename_and_cleanup.try_clear_leftovers(request.root)
        raise


@contextlib.contextmanager
def save_step(root: Path, ranks: SaveGroup) -> Iterator[None]:
    """Run one step of a save on all ranks; it ends when all have ended it.

    A CheckpointError, of the rank that raised it, also names the checkpoint that a run can still resume from.
    """
    with ranks.together():
        try:
            yield
        except CheckpointError as error:
            advice = f"{error.advice}; {_latest_checkpoint(root)}"
            raise CheckpointError(error.file, error.wrong, advice) from error.__cause__


def _latest_checkpoint(root: Path) -> str:
    try:
        iteration = checkpoint_folder.find(root).iteration
    except (CheckpointError, OSError):
        return f"there is no checkpoint in {root} yet"
    return f"the latest checkpoint is intact (iteration {iteration})"


@contextlib.contextmanager
def _disk_errors_of(path: Path) -> Iterator[None]:
    """Turn an OSError of the block into a CheckpointError that names `path`: a full or broken disk."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(path, f"cannot be written ({error})", "free or choose another disk") from error


# ---------------------------------------------------------------- rank 0, before: an empty folder


def _make_empty_folder(request: SaveRequest) -> None:
    partial = request.partial
    final = request.root / partial.name.removesuffix(manifest_format.PARTIAL)
    with _disk_errors_of(partial):
        file_layer.make_folders(request.root)
        _clear_leftovers(request)
        if file_layer.exists(final) and not publish_by_rename_and_cleanup.is_ours(final):
            wrong = f"exists and has no {manifest_format.MANIFEST}, so it is not ours to replace"
            raise CheckpointError(final, wrong, "move it away or choose another --save")
        publish_by_rename_and_cleanup.begin(partial)


def _clear_leftovers(request: SaveRequest) -> None:
    for problem in publish_by_rename_and_cleanup.try_clear_leftovers(request.root):
        request.warn(problem)


# ---------------------------------------------------------------- every rank: its pieces


def write_pieces_and_manifest(request: SaveRequest, items: dict[str, TensorToWrite], ranks: SaveGroup) -> None:
    """Write every rank's pieces, then the manifest of all of them. Every rank must call, after `_make_empty_folder`.

    Everything is in iter_N.partial/ (in an object store, the pieces are not): nothing is published here.
    """
    partial = request.partial

    # every rank writes its pieces and a manifest of them
    with save_step(request.root, ranks):
        manifest_bytes = _write_own_items(partial, request.iteration, ranks.rank, items)

    # rank 0 alone merges these manifests: it expects one from each rank that is a writer, with exactly that many bytes.
    # The numbers come by communication, so that a file which rank 0 does not see is not taken for one never written.
    bytes_by_rank = ranks.gather(manifest_bytes)  # one number of each rank, 0 of one without a manifest
    summary = None
    with save_step(request.root, ranks):
        if ranks.rank == 0:
            with _disk_errors_of(partial):
                manifest = _merge(partial, request.iteration, request.state, bytes_by_rank)
            summary = json.dumps({name: [record.dtype, record.shape] for name, record in manifest.tensors.items()})

    # every rank finds its tensors in the merged manifest, also those that another rank writes: by name, dtype and shape,
    # which rank 0 sends, so that not every rank reads the file
    summary = ranks.broadcast_from_first(summary)
    with save_step(request.root, ranks):
        _check_nothing_lost(partial, items, json.loads(summary))


def _write_own_items(partial: Path, iteration: int, rank: int, items: dict[str, TensorToWrite]) -> int:
    """Write the items of which this rank is the writer; return the bytes of their manifest, 0 if there are none.

    First the pieces, then the manifest that locates them, each synced before the next begins; last the folder's names.
    Without such items nothing is written, and the folder is not looked for.
    """
    own_items = {name: item for name, item in items.items() if item.is_writer}
    if not own_items:
        return 0
    with _disk_errors_of(partial):
        try:
            path = publish_by_rename_and_cleanup.rank_data_file(partial, rank)
        except FileNotFoundError as error:
            wrong = f"was made by the first rank but is not visible to rank {rank}"
            raise CheckpointError(partial, wrong, _NOT_SHARED) from error
    with _disk_errors_of(path):
        records, nbytes = _write_pieces(path, own_items)
        files = {path.name: nbytes} if nbytes else {}  # {}: tensors without elements have records and no file
        text = manifest_format.to_json(Manifest(iteration, {}, files, records))
        file_layer.write_and_sync_content(partial / manifest_format.file_name(rank, ".json"), text)
        file_layer.backend_of(partial).sync_folder(partial)
    return len(text)  # its bytes: JSON is written in ASCII


def _write_pieces(path: Path, items: dict[str, TensorToWrite]) -> tuple[dict[str, TensorRecord], int]:
    """Write all pieces to `path`, end to end in the order of `items`; return their records and the file's size.

    Without pieces no file is made, and the size is 0. On return the file's content is on the disk. After an error a part
    of the file stays; it goes with the folder.
    """
    records = {name: TensorRecord(item.dtype, item.shape, ()) for name, item in items.items()}
    if not any(item.pieces for item in items.values()):
        return records, 0
    # Mode "x" fails if the file exists: it would belong to another job that saves here.
    with file_layer.backend_of(path).open(path, "xb") as file:
        for name, item in items.items():
            # `buffers()` copies to the host only now, one buffer at a time
            pieces = tuple(_write_piece(file, path, box, buffers()) for box, buffers in item.pieces)
            records[name] = TensorRecord(item.dtype, item.shape, pieces)
        nbytes = file.tell()
        file_layer.backend_of(path).sync(file)
    return records, nbytes


def _write_piece(file: BinaryIO, path: Path, box: Box, buffers: Iterable[Any]) -> Piece:
    # Zeros come before the piece, so that it begins at a multiple of ALIGNMENT. The record counts the piece alone.
    padding = bytes(-file.tell() % manifest_format.ALIGNMENT)
    file_layer.write_all(file, padding, path)
    offset = file.tell()
    digest = hashlib.sha256()
    for data in buffers:
        # Hash while writing: reading the bytes back would double the time of a save.
        digest.update(data)
        file_layer.write_all(file, data, path)
    return Piece(box, path.name, offset, file.tell() - offset, digest.hexdigest())


# ---------------------------------------------------------------- rank 0: the manifest


def _merge(partial: Path, iteration: int, state: dict[str, Any], bytes_by_rank: list[int]) -> Manifest:
    """Write manifest.json, of all ranks' pieces, and remove the ranks' own manifests. Only rank 0 calls it.

    state: rank 0's, the only one that is written. bytes_by_rank: of each rank's own manifest, 0 if it wrote none. The
    pieces stay in the ranks' files, and their bytes are not read: their sizes and boxes are checked, their hashes are
    taken from the ranks.
    """
    # read each rank's manifest, at its full size, in rank order; a tensor's pieces, of several ranks, are put in one record
    expected = {manifest_format.file_name(rank, ".json"): nbytes for rank, nbytes in enumerate(bytes_by_rank) if nbytes}
    _check_sizes(partial, expected)
    merged = Manifest(iteration, state, {}, {})
    for name, nbytes in expected.items():
        text = file_layer.read_start(partial / name, nbytes).decode()
        part = manifest_format.parse_manifest(text, partial / name)
        merged.files.update(part.files)
        _add_records(merged.tensors, part.tensors, partial / name)

    # check that the raw files are there, at their full sizes, and that the pieces cover each tensor once
    _check_sizes(publish_by_rename_and_cleanup.rank_data_folder(partial), merged.files)
    manifest_format.check_complete(merged, partial, ONE_WRITER)
    text = manifest_format.to_json(merged)
    # what cannot be read must not become the latest
    manifest_format.parse_manifest(text, partial / manifest_format.MANIFEST)

    # write it; once it is on the disk, remove the ranks' manifests: two lists of the same pieces could disagree
    with _disk_errors_of(partial / manifest_format.MANIFEST):
        file_layer.write_and_sync_content(partial / manifest_format.MANIFEST, text)
        for name in expected:
            file_layer.backend_of(partial).remove(partial / name)
        file_layer.backend_of(partial).sync_folder(partial)
    return merged


def _check_sizes(folder: Path, expected: dict[str, int]) -> None:
    for name, nbytes in file_layer.sizes_of(folder, expected).items():
        if nbytes != expected[name]:
            wrong = "is not there" if nbytes is None else f"has {nbytes} bytes"
            wrong += f", though its rank wrote {expected[name]} bytes"
            raise CheckpointError(folder / name, wrong, _NOT_SHARED)


def _add_records(merged: dict[str, TensorRecord], part: dict[str, TensorRecord], file: Path) -> None:
    for name, record in part.items():
        known = merged.get(name, TensorRecord(record.dtype, record.shape, ()))
        if (known.dtype, known.shape) != (record.dtype, record.shape):
            earlier = f"an earlier rank as {known.dtype} {known.shape}"
            wrong = f"has tensor {name!r} as {record.dtype} {record.shape}, {earlier}"
            raise CheckpointError(file, wrong, "two different tensors share a name, or ranks disagree")
        merged[name] = TensorRecord(known.dtype, known.shape, known.pieces + record.pieces)


def _check_nothing_lost(partial: Path, items: dict[str, TensorToWrite], saved: dict[str, list]) -> None:
    """Raise CheckpointError if a tensor of this rank has no writer: otherwise only a later load would notice.

    saved: name -> [dtype, shape] of the merged manifest.
    """
    problems = []
    for name, item in items.items():
        if saved.get(name) == [item.dtype, list(item.shape)]:
            continue
        wrong = "has no rank that writes it"
        if name in saved:
            dtype, shape = saved[name]
            wrong = f"was saved as {dtype} {tuple(shape)}"
        problems.append(f"tensor {name!r}, {item.dtype} {item.shape}, {wrong}")
    if problems:
        raise CheckpointError(partial, problems, ONE_WRITER)


# ---------------------------------------------------------------- rank 0, after: the latest


def make_latest(request: SaveRequest, ranks: SaveGroup) -> None:
    """Make the written folder the latest checkpoint and remove what it replaces. Every rank must call.

    Rank 0 does it all; the others wait, so that no rank goes on before the checkpoint is the latest.
    """
    with save_step(request.root, ranks):
        if ranks.rank == 0:
            with _disk_errors_of(request.partial.with_suffix("")):
                # In this order: write the new pointer under a temporary name; rename an earlier save of this iteration out
                # of the way; rename iter_N.partial/ to iter_N/; rename the pointer to its name. Each rename is atomic, the
                # two are not one: a kill between them leaves a complete iter_N/ that `latest` does not name.
                publish_by_rename_and_cleanup.publish(request.partial, request.iteration)
            # Only now is the earlier save removed. What cannot be removed is a warning, not an error.
            _clear_leftovers(request)
