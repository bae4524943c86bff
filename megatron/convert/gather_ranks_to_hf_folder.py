"""Write the model of running ranks as a Hugging Face folder: gather a tensor at a time on rank 0, and write it.

    all ranks    some rows of a tensor, in its dtype: this rank's elements, zeros elsewhere
    all ranks    an all-reduce (sum) of these rows' bytes; one rank contributes each element, so the sum is its bits
    rank 0       the rows in host memory; when all are there, the tensors that the family makes of them, into the file

So any layout can be written: the rank that saves an element in a checkpoint contributes it here. A rank has at most 16
MiB of rows on its device; the first has one tensor of ours, and one Hugging Face tensor, in host memory.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from math import prod
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from megatron.convert.families.hf_family_fields_and_param_mappings import ParamMapping
from megatron.convert.plan_hf_folder import FolderPlan, write_config_and_aux_files, write_weights_file
from megatron.core.dist_checkpointing.local_tensor import LocalTensor
from megatron.core.dist_checkpointing.manifest_format import TensorRecord
from megatron.core.offload.tensor_in_memory_or_file import start_reading
from megatron.core.parallel import collectives
from megatron.core.parallel.rank_grid import Axis
from megatron.core.sharding.boxes import Box, intersect, relative_to, size_of, slices, whole
from megatron.core.storage.file_layer import make_folders

_ROW_BLOCK_BYTES = 16 << 20  # bytes of a tensor's rows that the ranks add up at a time
_T = TypeVar("_T")


def gather_tensor_records(
    tensors: Mapping[str, LocalTensor], world: Axis, device: torch.device | str
) -> dict[str, TensorRecord]:
    """Return the dtype and full shape of each tensor that the ranks hold together, by name. Every rank must call.

    Raises AssertionError unless the ranks that save a tensor have as many elements together as it has. tensors: name ->
    this rank's part.
    """
    saved_here = []
    for name, local in tensors.items():
        if local.is_writer and local.pieces:
            numel = sum(prod(size_of(box)) for box, _ in local.pieces)
            saved_here.append((name, local.dtype, list(local.shape), numel))

    records: dict[str, TensorRecord] = {}
    numels: dict[str, int] = {}
    for text in collectives.all_gather_texts(json.dumps(saved_here), world, device):
        for name, dtype, shape, numel in json.loads(text):
            records[name] = TensorRecord(dtype, tuple(shape), ())
            numels[name] = numels.get(name, 0) + numel
    for name, record in records.items():
        assert numels[name] == prod(record.shape), f"{name} of {record.shape} has {numels[name]} elements on all ranks"
    return records


def write_hf_folder_from_ranks(
    plan: FolderPlan,
    tensors: Mapping[str, LocalTensor],
    out: Path,
    world: Axis,
    device: torch.device | str,
    *,
    note: Callable[[str], object] = lambda line: None,
) -> None:
    """Write the planned folder into `out`, which must not exist. Every rank must call, with the tensors that it holds.

    If one rank fails, all raise, and the folder is incomplete. note: called on the first rank with a line about files
    that are not written. tensors: name -> this rank's part, as `sharded_model_state` has it. Raises CheckpointError, or
    PeerError if another rank fails.
    """
    with collectives.raise_together(world, device):
        if world.is_first:
            make_folders(out)
    for name, file in plan.files.items():
        first_error = _FirstError()
        # `_gather` is collective: every rank must take all items of this iterator.
        params = ((mapping, _gather(mapping, plan, tensors, first_error, world, device)) for mapping in file.mappings)
        if world.is_first:
            first_error.attempt(partial(write_weights_file, out / name, plan, file, params))
        # Gather what is left too, also where the disk is full: the other ranks are in the same collectives.
        for _ in params:
            pass
        with collectives.raise_together(world, device):
            first_error.raise_it()
    with collectives.raise_together(world, device):
        if world.is_first:
            write_config_and_aux_files(plan, out, None, note)


class _FirstError:
    """The first error of work during which this rank must keep taking part in collectives, whatever fails."""

    def __init__(self) -> None:
        self.error: Exception | None = None

    def attempt(self, work: Callable[[], _T]) -> _T | None:
        """Return what `work` returns; if it raises, record the error and return None. A lost peer is raised at once."""
        try:
            return work()
        except collectives.LostPeerError:
            raise
        except Exception as error:
            self.error = self.error or error
            return None

    def raise_it(self) -> None:
        if self.error is not None:
            raise self.error


def _gather(
    mapping: ParamMapping,
    plan: FolderPlan,
    tensors: Mapping[str, LocalTensor],
    first_error: _FirstError,
    world: Axis,
    device: torch.device | str,
) -> Tensor:
    """Gather a parameter of ours on the first rank, in host memory; the others get an empty tensor.

    Every rank calls one all-reduce for each block of rows.
    """
    shape = plan.record_of(mapping).shape
    dtype = plan.dtype_of(mapping)
    local = tensors.get(plan.name_of(mapping))
    ours = torch.empty(shape if world.is_first else (0,), dtype=dtype)
    for box in _row_blocks(shape, dtype.itemsize):
        rows = torch.zeros(size_of(box), dtype=dtype, device=device)
        if local is not None and local.is_writer:
            first_error.attempt(partial(_copy_local_elements, local, box, rows))
        # The sum of bytes: all ranks but one have zeros in each, so nothing is rounded and nothing overflows.
        collectives.all_reduce(rows.view(-1).view(torch.uint8), world)
        if world.is_first:
            ours[slices(box)] = rows
    return ours


def _row_blocks(shape: tuple[int, ...], item_bytes: int) -> Iterator[Box]:
    """Yield boxes of full rows, in order, each of at most `_ROW_BLOCK_BYTES` bytes or of one row.

    item_bytes: of an element.
    """
    if not shape:
        yield ()
        return
    row_bytes = prod(shape[1:]) * item_bytes
    rows = max(_ROW_BLOCK_BYTES // max(row_bytes, 1), 1)
    for start in range(0, shape[0], rows):
        yield ((start, min(start + rows, shape[0])), *whole(shape[1:]))


def _copy_local_elements(local: LocalTensor, box: Box, rows: Tensor) -> None:
    """Copy this rank's elements of `box`, a box of full rows, into `rows`, in its dtype."""
    for piece in local.pieces:
        overlap = intersect(piece[0], box)
        if overlap is None:
            continue
        region = local.region(piece)
        if overlap:  # () for a tensor without dimensions, which has no rows to select
            first_dim = relative_to(overlap, piece[0])[0]
            region = region[slice(*first_dim)]
        rows[slices(relative_to(overlap, box))] = start_reading(region).wait().view(size_of(overlap))
