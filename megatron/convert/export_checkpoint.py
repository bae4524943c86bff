"""A checkpoint as a Hugging Face folder, written while it is read: one thread reads, one writes, one waits for the disk.

    reads     at most 16 MiB of a tensor of ours, and hashes them             into one of two buffers
    writes    the part before, in the dtype asked for                         each stretch at its place in the file
    syncs     the file before

A tensor that the family holds transposed, or of which the checkpoint has columns apart, is read as a whole and then
written: a
rank has two such tensors in memory at most. The folder gets its name when it is complete.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import ExitStack
from itertools import cycle
from math import prod
from pathlib import Path
from typing import BinaryIO, NamedTuple, TypeVar

import torch
from torch import Tensor

from megatron.convert.export_plan import (
    FolderPlan,
    PlannedFile,
    bytes_of_tensor,
    finish_folder,
    plan_folder,
    their_tensors,
)
from megatron.convert.families.family import Row
from megatron.convert.families.weight_layout import Stretch, stretches_of
from megatron.convert.formats.safetensors_header import header_of
from megatron.convert.hf_origin import check_chosen
from megatron.core.base.dataclass_flags import ConfigError
from megatron.core.dist_checkpointing.format import PARTIAL
from megatron.core.dist_checkpointing.load_sharded import Checkpoint
from megatron.core.dist_checkpointing.local_tensor import LocalTensor
from megatron.core.parallel import collectives
from megatron.core.parallel.grid import ALONE, Axis
from megatron.core.sharding.boxes import whole
from megatron.core.storage.file_layer import backend_of, exists, make_folders, remove_tree, write_all

_PART = 16 << 20  # bytes read, hashed and written at a time
_T = TypeVar("_T")


class _Part(NamedTuple):
    """Values of a tensor of ours from element `start` on; None: of a tensor that is to be read as a whole."""

    row: Row
    start: int = 0
    values: Tensor | None = None


def write_hf_folder(
    checkpoint: Checkpoint,
    out: Path,
    *,
    kind: str | None = None,
    dtype: str | None = None,
    most_bytes: int = 5 << 30,
    along: Path | None = None,
    allow_missing: bool = False,
    note: Callable[[str], object] = lambda line: None,
    world: Axis = ALONE,
    device: torch.device | str = "cpu",
) -> str:
    """Write the model of a checkpoint as the folder `out`, which must not exist; returns its model_type.

    Every rank of `world` must call, and writes its share of the files. kind: the model_type; default: that of the folder
    that
    the model came from, or the first family that can say what it computes. dtype: of all tensors; default: as they are.
    most_bytes: of one file. along: the folder with the tokenizer's files; default: where the model came from, and only
    files that
    are as they were then. allow_missing: writes a model that lacks tensors, without them. note: told, on the first rank,
    of files
    and of tensors that are not written. Raises ConfigError, CheckpointError.
    """
    partial = out.with_name(out.name + PARTIAL)
    with collectives.raise_together(world, device):
        options = {"kind": kind, "dtype": dtype, "most_bytes": most_bytes, "allow_missing": allow_missing}
        options["note"] = note if world.is_first else lambda line: None
        plan = plan_folder(checkpoint.state, checkpoint.manifest.tensors, str(checkpoint.folder), **options)
        if world.is_first:
            if exists(out):
                raise ConfigError(f"{out} is there already; a folder is written anew: choose another")
            if along is not None:
                check_chosen(along)
            if exists(partial):
                remove_tree(partial)
            make_folders(partial)
    with collectives.raise_together(world, device):
        write_files(checkpoint, plan, partial, list(plan.files)[world.rank :: world.size])
    with collectives.raise_together(world, device):
        if world.is_first:
            finish_folder(plan, partial, along, note)
            backend_of(partial).rename(partial, out)
            backend_of(out).sync_folder(out.parent)
    return plan.kind


def write_files(checkpoint: Checkpoint, plan: FolderPlan, folder: Path, names: list[str]) -> None:
    """Write some of the planned files. One process calls. When this returns they are on the disk; when it raises,
    incomplete.

    Raises CheckpointError, OSError.
    """
    rooms = cycle([torch.empty(_PART, dtype=torch.uint8) for _ in range(2)])
    syncing: Future[None] | None = None
    with ExitStack() as opened, ThreadPoolExecutor(1) as reader, ThreadPoolExecutor(1) as syncer:
        for name in names:
            planned, path = plan.files[name], folder / name
            file = opened.enter_context(backend_of(path).open(path, "xb"))
            parts = _ahead(_parts(checkpoint, plan, planned, rooms), reader)
            _write(file, path, checkpoint, plan, planned, parts)
            if syncing is not None:
                syncing.result()
            syncing = syncer.submit(_sync, file, path)
        if syncing is not None:
            syncing.result()


def _sync(file: BinaryIO, path: Path) -> None:
    with file:
        backend_of(path).sync(file)


def _ahead(items: Iterator[_T], reader: Executor) -> Iterator[_T]:
    """The items, each made by the reader while the one before is in use."""
    end = object()
    upcoming = reader.submit(next, items, end)
    while (item := upcoming.result()) is not end:
        upcoming = reader.submit(next, items, end)
        yield item


def _stretches(checkpoint: Checkpoint, plan: FolderPlan, row: Row) -> list[Stretch] | None:
    return (
        stretches_of(row.operation, plan.heads, plan.record_of(row).shape)
        if checkpoint.has_runs(plan.name_of(row))
        else None
    )


def _parts(checkpoint: Checkpoint, plan: FolderPlan, planned: PlannedFile, rooms: Iterator[Tensor]) -> Iterator[_Part]:
    for row in planned.rows:
        if _stretches(checkpoint, plan, row) is None:
            yield _Part(row)
            continue
        for start, values in checkpoint.runs(plan.name_of(row), rooms):
            yield _Part(row, start, values)


def _write(
    file: BinaryIO, path: Path, checkpoint: Checkpoint, plan: FolderPlan, planned: PlannedFile, parts: Iterator[_Part]
) -> None:
    begin, stretches = {}, {}
    write_all(file, head := header_of(planned.tensors), path)
    end = len(head)
    for row in planned.rows:
        begin[row], stretches[row] = end, _stretches(checkpoint, plan, row) or []
        end += prod(plan.record_of(row).shape) * plan.dtype_of(row).itemsize
    for row, start, values in parts:
        ours = _whole(checkpoint, plan, row) if values is None else values.to(plan.dtype_of(row))
        plan.check_held(row, ours)
        if values is None:
            file.seek(begin[row])
            for theirs in their_tensors(row.operation, plan.heads, ours):
                write_all(file, bytes_of_tensor(theirs), path)
            continue
        data, stop = bytes_of_tensor(ours), start + len(ours)
        for x in stretches[row]:
            first, last = max(x.start, start), min(x.stop, stop)
            if first < last:
                file.seek(begin[row] + (x.to + first - x.start) * ours.itemsize)
                write_all(file, data[(first - start) * ours.itemsize : (last - start) * ours.itemsize], path)


def _whole(checkpoint: Checkpoint, plan: FolderPlan, row: Row) -> Tensor:
    name, shape = plan.name_of(row), plan.record_of(row).shape
    ours, box = torch.empty(shape, dtype=plan.dtype_of(row)), whole(shape)
    checkpoint.read_into({name: LocalTensor(ours, shape, [(box, box)], False)}, convert=True, in_place=True)
    return ours
