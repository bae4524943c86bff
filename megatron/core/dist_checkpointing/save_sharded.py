"""A save by all training ranks, in the steps of `write_and_publish`.

The pieces of each rank pass through one bounded buffer.
"""

import contextlib
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.core.dist_checkpointing import manifest_format
from megatron.core.dist_checkpointing.local_tensor import LocalTensor, problems_of_tensors
from megatron.core.dist_checkpointing.manifest_format import CheckpointError
from megatron.core.dist_checkpointing.write_and_publish import SaveRequest, TensorToWrite, save_step, write_and_publish
from megatron.core.dist_checkpointing.write_balance import balance_writes
from megatron.core.offload.tensor_in_memory_or_file import Stored, StoredTensor
from megatron.core.parallel import collectives
from megatron.core.parallel.rank_grid import Axis
from megatron.core.sharding.boxes import Box
from megatron.core.storage.path_or_url import path_of

_CHUNK = 16 << 20  # bytes copied to the host, hashed and written at a time: all the memory that saving needs


class _AxisSaveGroup:
    """The ranks of an axis as a `SaveGroup`, by collectives on `device`."""

    def __init__(self, world: Axis, device: torch.device | str):
        self.rank = world.rank
        self._world = world
        self._device = device

    def together(self) -> contextlib.AbstractContextManager[None]:
        return collectives.raise_together(self._world, self._device)

    def gather(self, number: int) -> list[int]:
        return collectives.all_gather(torch.tensor([number], device=self._device), self._world).tolist()

    def broadcast_from_first(self, text: str | None) -> str:
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
    """Save `tensors` and `state` as iteration `iteration` below `root`; return the checkpoint's folder.

    tensors: name -> this rank's part, as `LocalTensor` has it. Every rank of `world` must call, with the tensors that
    it holds itself; `state` is plain JSON, and the first rank's is saved. device: where the ranks' collectives
    communicate. When this returns on any rank, the checkpoint is on disk and is the latest. If any rank fails, all
    raise, and `latest` names what it named before. A checkpoint of the same iteration is replaced. `warn` is called, on
    the first rank, with what could not be removed.
    """
    ranks = _AxisSaveGroup(world, device)
    request = SaveRequest(path_of(root), iteration, state, warn)
    with save_step(request.root, ranks):
        check_tensors_and_state(request, tensors, is_first=world.is_first)
    items = {name: tensor_to_write(local) for name, local in balance_writes(tensors).items()}
    write_and_publish(request, items, ranks)
    return request.partial.with_suffix("")


def check_tensors_and_state(request: SaveRequest, tensors: dict[str, LocalTensor], *, is_first: bool) -> None:
    """Raise CheckpointError for what cannot be saved, before anything is written.

    tensors: name -> this rank's part, as `LocalTensor` has it. is_first: on the rank whose state counts.
    """
    problems = problems_of_tensors(tensors)
    problems += [f"a tensor is named {name!r}; names are text" for name in tensors if not isinstance(name, str)]
    if is_first:
        problems += manifest_format.state_problems(request.state)
    if not isinstance(request.state, dict):
        problems.append(f"state is a {type(request.state).__name__}; it must be a dict")
    if request.iteration < 0:
        problems.append(f"iteration is {request.iteration!r}; it must be an integer from 0 up")
    if problems:
        raise CheckpointError(request.root, problems, "nothing was written")


def tensor_to_write(local: LocalTensor) -> TensorToWrite:
    """Return a tensor of any shape for `write_and_publish`.

    That copies it to the host one bounded buffer at a time.
    """
    pieces = []
    if local.is_writer:
        for piece in local.pieces:
            global_box = piece[0]
            pieces.append((global_box, partial(_host_buffers, local, piece)))
    return TensorToWrite(local.dtype, tuple(local.shape), local.is_writer, pieces)


def _host_buffers(local: LocalTensor, piece: tuple[Box, Box]) -> Iterator[memoryview]:
    for chunk in _chunks(local.region(piece)):
        yield chunk.cpu().reshape(-1).view(torch.uint8).numpy().data


def _chunks(x: Stored) -> Iterator[Tensor]:
    """Yield the elements of `x` in row-major order, in tensors of at most `_CHUNK` bytes: views, or read one by one."""
    if isinstance(x, StoredTensor):
        for part in x.parts(_CHUNK):
            yield part.start_reading().wait()
        return
    if x.nbytes <= _CHUNK:
        yield x
        return
    rows = _CHUNK * len(x) // x.nbytes
    if rows:
        yield from x.split(rows)
    else:  # one row is larger than a chunk
        for row in x:
            yield from _chunks(row)
