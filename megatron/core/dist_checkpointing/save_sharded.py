"""Saving in one call of every rank that trains: its pieces pass through one bounded buffer to `write_and_publish.py`."""

import contextlib
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.core.dist_checkpointing import format
from megatron.core.dist_checkpointing.format import CheckpointError
from megatron.core.dist_checkpointing.local_tensor import LocalTensor, problems_of_tensors
from megatron.core.dist_checkpointing.write_and_publish import HeldPart, Saving, saving_together, write_and_publish
from megatron.core.dist_checkpointing.write_balance import shares
from megatron.core.offload.stored_tensor import Stored, StoredTensor
from megatron.core.parallel import collectives
from megatron.core.parallel.grid import Axis
from megatron.core.sharding.boxes import Box
from megatron.core.storage.paths import path_of

_CHUNK = 16 << 20  # bytes copied to the host, hashed and written at a time: all the memory that saving needs


class _Collectives:
    """The agreement of the ranks of an axis, which communicate on `device`."""

    def __init__(self, world: Axis, device: torch.device | str):
        self.rank = world.rank
        self._world, self._device = world, device

    def together(self) -> contextlib.AbstractContextManager[None]:
        return collectives.raise_together(self._world, self._device)

    def gather(self, number: int) -> list[int]:
        return collectives.all_gather(torch.tensor([number], device=self._device), self._world).tolist()

    def first_says(self, text: str | None) -> str:
        return collectives.broadcast_text(text, self._world, self._device)


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
    ranks, saving = _Collectives(world, device), Saving(path_of(root), iteration, state, warn)
    with saving_together(saving.root, ranks):
        check_savable(saving, tensors, is_first=world.is_first)
    write_and_publish(saving, {name: part_of(local) for name, local in shares(tensors).items()}, ranks)
    return saving.partial.with_suffix("")


def check_savable(saving: Saving, tensors: dict[str, LocalTensor], *, is_first: bool) -> None:
    """Raises CheckpointError for what cannot be saved, before anything is written."""
    problems = problems_of_tensors(tensors)
    problems += [f"a tensor is named {name!r}; names are text" for name in tensors if not isinstance(name, str)]
    problems += format.state_problems(saving.state) if is_first else []
    if not isinstance(saving.state, dict):
        problems.append(f"state is a {type(saving.state).__name__}; it must be a dict")
    if saving.iteration < 0:
        problems.append(f"iteration is {saving.iteration!r}; it must be an integer from 0 up")
    if problems:
        raise CheckpointError(saving.root, problems, "nothing was written")


def part_of(local: LocalTensor) -> HeldPart:
    """Its elements are copied to the host only when they are asked for, one bounded buffer at a time."""
    pieces = [(piece[0], partial(_buffers, local, piece)) for piece in local.pieces if local.is_writer]
    return HeldPart(local.dtype, tuple(local.shape), local.is_writer, pieces)


def _buffers(local: LocalTensor, piece: tuple[Box, Box]) -> Iterator[memoryview]:
    for chunk in _chunks(local.region(piece)):
        yield chunk.cpu().reshape(-1).view(torch.uint8).numpy().data


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
