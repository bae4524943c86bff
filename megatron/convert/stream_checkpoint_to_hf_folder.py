"""Write a checkpoint as a Hugging Face folder while it is read: one thread reads, one writes, one waits for the disk.

    reads     at most 16 MiB of a tensor of ours, and hashes them             into one of two buffers
    writes    the part before, in the requested dtype                         each range at its place in the file
    syncs     the file before

A tensor that the family stores transposed, or whose columns the checkpoint holds in separate pieces, is read in full
and then written: a rank has at most two such tensors in memory. The folder gets its final name when it is complete.
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

from megatron.convert.families.hf_family_fields_and_param_mappings import ParamMapping
from megatron.convert.families.strided_views_of_hf_weights import FlatCopyRange, contiguous_copy_ranges
from megatron.convert.formats.safetensors_header import header_of
from megatron.convert.hf_provenance_and_tokenizer_files import check_tokenizer_folder
from megatron.convert.plan_hf_folder import (
    FolderPlan,
    PlannedFile,
    bytes_of_tensor,
    plan_folder,
    to_hf_tensors,
    write_config_and_aux_files,
)
from megatron.core.base.dataclass_flags import ConfigError
from megatron.core.dist_checkpointing.load_sharded import Checkpoint
from megatron.core.dist_checkpointing.local_tensor import LocalTensor
from megatron.core.dist_checkpointing.manifest_format import PARTIAL
from megatron.core.parallel import collectives
from megatron.core.parallel.rank_grid import ALONE, Axis
from megatron.core.sharding.boxes import whole
from megatron.core.storage.file_layer import backend_of, exists, make_folders, remove_tree, write_all

_PART_BYTES = 16 << 20  # bytes read, hashed and written at a time
_T = TypeVar("_T")


class _Part(NamedTuple):
    """Values of our tensor from element `start` on; values None: the tensor must be read in full."""

    mapping: ParamMapping
    start: int = 0
    values: Tensor | None = None  # [n]


def write_hf_folder(
    checkpoint: Checkpoint,
    out: Path,
    *,
    kind: str | None = None,
    dtype: str | None = None,
    most_bytes: int = 5 << 30,
    tokenizer_folder: Path | None = None,
    allow_missing: bool = False,
    note: Callable[[str], object] = lambda line: None,
    world: Axis = ALONE,
    device: torch.device | str = "cpu",
) -> str:
    """Write the model of a checkpoint as the folder `out`, which must not exist; return its model_type.

    Every rank of `world` must call, and writes its share of the files.

        kind              the model_type; default: that of the folder that the model came from, or the first family that
                          can describe the model
        dtype             of all tensors; default: unchanged
        most_bytes        of one file
        tokenizer_folder  the folder with the tokenizer's files; default: the folder that the model came from, of which
                          only files are copied that have not changed since
        allow_missing     write a model that lacks tensors, without them
        note              called on the first rank with a line about files and tensors that are not written

    Raises ConfigError, CheckpointError.
    """
    partial = out.with_name(out.name + PARTIAL)

    # plan, and make an empty folder under a temporary name
    with collectives.raise_together(world, device):
        plan = plan_folder(
            checkpoint.state,
            checkpoint.manifest.tensors,
            str(checkpoint.folder),
            kind=kind,
            dtype=dtype,
            most_bytes=most_bytes,
            allow_missing=allow_missing,
            note=note if world.is_first else lambda line: None,
        )
        if world.is_first:
            if exists(out):
                raise ConfigError(f"{out} exists already; give a folder that does not exist")
            if tokenizer_folder is not None:
                check_tokenizer_folder(tokenizer_folder)
            if exists(partial):
                remove_tree(partial)
            make_folders(partial)

    # every rank writes its files of weights
    with collectives.raise_together(world, device):
        write_files(checkpoint, plan, partial, list(plan.files)[world.rank :: world.size])

    # the first rank adds the other files, and gives the folder its name
    with collectives.raise_together(world, device):
        if world.is_first:
            write_config_and_aux_files(plan, partial, tokenizer_folder, note)
            backend_of(partial).rename(partial, out)
            backend_of(out).sync_folder(out.parent)
    return plan.kind


def write_files(checkpoint: Checkpoint, plan: FolderPlan, folder: Path, names: list[str]) -> None:
    """Write the planned files with these names. One process calls.

    The files are on the disk when this returns, and incomplete when it raises CheckpointError or OSError.
    """
    buffers = cycle([torch.empty(_PART_BYTES, dtype=torch.uint8) for _ in range(2)])
    syncing: Future[None] | None = None
    with ExitStack() as open_files, ThreadPoolExecutor(1) as reader, ThreadPoolExecutor(1) as syncer:
        for name in names:
            planned = plan.files[name]
            path = folder / name
            file = open_files.enter_context(backend_of(path).open(path, "xb"))
            parts = _read_ahead(_parts(checkpoint, plan, planned, buffers), reader)
            _write(file, path, checkpoint, plan, planned, parts)
            # At most one file waits for the disk: the next one is written meanwhile.
            if syncing is not None:
                syncing.result()
            syncing = syncer.submit(_sync, file, path)
        if syncing is not None:
            syncing.result()


def _sync(file: BinaryIO, path: Path) -> None:
    with file:
        backend_of(path).sync(file)


def _read_ahead(items: Iterator[_T], reader: Executor) -> Iterator[_T]:
    """Yield the items, each produced by the reader thread while the caller uses the one before."""
    end = object()
    upcoming = reader.submit(next, items, end)
    while (item := upcoming.result()) is not end:
        upcoming = reader.submit(next, items, end)
        yield item


def _copy_ranges(checkpoint: Checkpoint, plan: FolderPlan, mapping: ParamMapping) -> list[FlatCopyRange] | None:
    """Return the ranges that can be copied while the parameter is read; None if it must be read in full first."""
    if not checkpoint.has_runs(plan.name_of(mapping)):
        return None
    return contiguous_copy_ranges(mapping.operation, plan.heads, plan.record_of(mapping).shape)


def _parts(
    checkpoint: Checkpoint, plan: FolderPlan, planned: PlannedFile, buffers: Iterator[Tensor]
) -> Iterator[_Part]:
    """Read a file's parameters part by part. This runs in the reader thread."""
    for mapping in planned.mappings:
        if _copy_ranges(checkpoint, plan, mapping) is None:
            yield _Part(mapping)
            continue
        for start, values in checkpoint.runs(plan.name_of(mapping), buffers):
            yield _Part(mapping, start, values)


def _write(
    file: BinaryIO, path: Path, checkpoint: Checkpoint, plan: FolderPlan, planned: PlannedFile, parts: Iterator[_Part]
) -> None:
    """Write the header, then each part at its place."""
    header = header_of(planned.tensors)
    write_all(file, header, path)

    # where each parameter's tensors begin in the file
    offsets: dict[ParamMapping, int] = {}
    ranges: dict[ParamMapping, list[FlatCopyRange]] = {}
    end = len(header)
    for mapping in planned.mappings:
        offsets[mapping] = end
        ranges[mapping] = _copy_ranges(checkpoint, plan, mapping) or []
        end += prod(plan.record_of(mapping).shape) * plan.dtype_of(mapping).itemsize

    for mapping, start, values in parts:
        if values is None:
            # a parameter that is read in full
            ours = _read_in_full(checkpoint, plan, mapping)
            plan.check_finite(mapping, ours)
            file.seek(offsets[mapping])
            for hf_tensor in to_hf_tensors(mapping.operation, plan.heads, ours):
                write_all(file, bytes_of_tensor(hf_tensor), path)
            continue

        # elements `start` to `stop` of a parameter, of which each range goes to another place
        ours = values.to(plan.dtype_of(mapping))  # [n]
        plan.check_finite(mapping, ours)
        data = bytes_of_tensor(ours)
        stop = start + len(ours)
        for copy_range in ranges[mapping]:
            first = max(copy_range.start, start)
            last = min(copy_range.stop, stop)
            if first < last:
                hf_element = copy_range.hf_start + first - copy_range.start
                file.seek(offsets[mapping] + hf_element * ours.itemsize)
                write_all(file, data[(first - start) * ours.itemsize : (last - start) * ours.itemsize], path)


def _read_in_full(checkpoint: Checkpoint, plan: FolderPlan, mapping: ParamMapping) -> Tensor:
    """Read a parameter in the dtype in which it is written."""
    name = plan.name_of(mapping)
    shape = plan.record_of(mapping).shape
    ours = torch.empty(shape, dtype=plan.dtype_of(mapping))
    box = whole(shape)
    checkpoint.read_into({name: LocalTensor(ours, shape, [(box, box)], False)}, convert=True, in_place=True)
    return ours
