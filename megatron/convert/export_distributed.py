"""The model of running ranks as a Hugging Face folder: one tensor at a time is put together on the first rank and written.

    all ranks    some rows of a tensor, in its dtype: this rank's elements, zeros elsewhere
    all ranks    the sum of these rows' bytes over the ranks; each element is held by one writer, so the sum is its bits
    rank 0       the rows of the tensor in host memory; when all are there, the tensors that the family makes of it, into
    the file

So any layout is written: whoever saves an element in a checkpoint gives it here. A rank has at most 16 MiB of rows on its
device; the first has one tensor of ours, and one of theirs, in host memory.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from math import prod
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from megatron.convert.export_plan import FolderPlan, finish_folder, write_rows
from megatron.convert.families.family import Row
from megatron.core.dist_checkpointing.format import TensorRecord
from megatron.core.dist_checkpointing.local_tensor import LocalTensor
from megatron.core.offload.stored_tensor import start_reading
from megatron.core.parallel import collectives
from megatron.core.parallel.grid import Axis
from megatron.core.sharding.boxes import Box, intersect, relative_to, size_of, slices, whole
from megatron.core.storage.file_layer import make_folders

_ROWS = 16 << 20  # bytes of a tensor that the ranks add up at a time
_T = TypeVar("_T")


def records_of_ranks(
    tensors: Mapping[str, LocalTensor], world: Axis, device: torch.device | str
) -> dict[str, TensorRecord]:
    """The dtype and shape of each tensor that the ranks hold together, by name. Every rank must call.

    Raises AssertionError unless each element has one writer, as far as their number tells.
    """
    mine = [
        (name, local.dtype, list(local.shape), sum(prod(size_of(box)) for box, _ in local.pieces))
        for name, local in tensors.items()
        if local.is_writer and local.pieces
    ]
    found: dict[str, TensorRecord] = {}
    counts: dict[str, int] = {}
    for text in collectives.all_gather_texts(json.dumps(mine), world, device):
        for name, dtype, shape, count in json.loads(text):
            found[name] = TensorRecord(dtype, tuple(shape), ())
            counts[name] = counts.get(name, 0) + count
    for name, record in found.items():
        assert counts[name] == prod(record.shape), f"{name} of {record.shape} has {counts[name]} elements on all ranks"
    return found


def write_gathered(
    plan: FolderPlan,
    tensors: Mapping[str, LocalTensor],
    out: Path,
    world: Axis,
    device: torch.device | str,
    *,
    note: Callable[[str], object] = lambda line: None,
) -> None:
    """Write all of the planned folder into `out`, which must not exist. Every rank must call, with what it holds itself.

    If one rank fails, all raise, and the folder is incomplete. note: told, on the first rank, of files that are not written.
    """
    with collectives.raise_together(world, device):
        if world.is_first:
            make_folders(out)
    for name, file in plan.files.items():
        first = _FirstError()
        rows = ((row, _gathered(row, plan, tensors, first, world, device)) for row in file.rows)
        if world.is_first:
            first.attempt(partial(write_rows, out / name, plan, file, rows))
        for _ in rows:  # all that are left, also where the disk is full: the other ranks are in the same calls
            pass
        with collectives.raise_together(world, device):
            first.raise_it()
    with collectives.raise_together(world, device):
        if world.is_first:
            finish_folder(plan, out, None, note)


class _FirstError:
    """The first error of a stretch in which this rank must go on communicating, whatever fails."""

    def __init__(self) -> None:
        self.error: Exception | None = None

    def attempt(self, work: Callable[[], _T]) -> _T | None:
        """What `work` returns; None, and the error is kept, if it fails."""
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


def _gathered(
    row: Row,
    plan: FolderPlan,
    tensors: Mapping[str, LocalTensor],
    first: _FirstError,
    world: Axis,
    device: torch.device | str,
) -> Tensor:
    """The tensor of ours of a row on the first rank, in host memory; nothing on the others. An all-reduce for each part."""
    shape, dtype = plan.record_of(row).shape, plan.dtype_of(row)
    local = tensors.get(plan.name_of(row))
    ours = torch.empty(shape if world.is_first else (0,), dtype=dtype)
    for box in _spans(shape, dtype.itemsize):
        part = torch.zeros(size_of(box), dtype=dtype, device=device)
        if local is not None and local.is_writer:
            first.attempt(partial(_put_mine, local, box, part))
        collectives.all_reduce(part.view(-1).view(torch.uint8), world)
        if world.is_first:
            ours[slices(box)] = part
    return ours


def _spans(shape: tuple[int, ...], item: int) -> Iterator[Box]:
    """Boxes of whole rows, in order, each of at most `_ROWS` bytes or of one row. item: bytes of an element."""
    if not shape:
        yield ()
        return
    rows = max(_ROWS // max(prod(shape[1:]) * item, 1), 1)
    for start in range(0, shape[0], rows):
        yield ((start, min(start + rows, shape[0])), *whole(shape[1:]))


def _put_mine(local: LocalTensor, box: Box, part: Tensor) -> None:
    """Copy this rank's elements of `box`, which has whole rows, into `part`, in its dtype."""
    for piece in local.pieces:
        if (shared := intersect(piece[0], box)) is None:
            continue
        region = local.region(piece)
        if shared:
            region = region[slice(*relative_to(shared, piece[0])[0])]
        part[slices(relative_to(shared, box))] = start_reading(region).wait().view(size_of(shared))
