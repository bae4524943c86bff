"""Saving beside training: the ranks wait while their state is copied to host memory; processes write and publish it.

    saves = BackgroundSaves(world, device)        a process for each rank, and the memory for its part
    saves.start(root, 100, tensors, state)        waits for the save before, copies, returns
    saves.poll()                                  at every step: what is done since, or the error of a save that failed
    saves.finish()                                waits for the save in flight

The memory is shared with the process, allocated once, and locked for fast copies where the state is a device's.
"""

import contextlib
import json
import mmap
import os
import select
import socket
import tempfile
import time
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron.core.base import rank_status
from megatron.core.dist_checkpointing import format, writer_process
from megatron.core.dist_checkpointing.format import CheckpointError
from megatron.core.dist_checkpointing.local_tensor import LocalTensor
from megatron.core.dist_checkpointing.save_sharded import check_savable
from megatron.core.dist_checkpointing.write_and_publish import Saving
from megatron.core.dist_checkpointing.write_balance import shares
from megatron.core.dist_checkpointing.writer_sockets import Messages
from megatron.core.offload.stored_tensor import StoredTensor
from megatron.core.parallel import accelerator as devices, collectives
from megatron.core.parallel.grid import Axis
from megatron.core.sharding.boxes import size_of
from megatron.core.storage.paths import path_of

_CHUNK = 16 << 20  # bytes of a tensor in a file that are read at a time
_LOOKS_EVERY = 1.0  # seconds, what the writer does


class SavedInBackground(NamedTuple):
    """A checkpoint that is on disk and is the latest."""

    iteration: int
    root: str
    durable: float  # seconds from the start of the save until it was the latest
    warnings: list[str]


# ---------------------------------------------------------------- the copy


class SharedMemory:
    """Host memory that another process may map. It goes with the last process that holds it, killed or not."""

    def __init__(self, nbytes: int, device: torch.device | str = "cpu"):
        """device: of the tensors that are copied there. Raises OSError if there is not as much memory."""
        self.nbytes = max(nbytes, 1)
        self.handle = _new_handle()
        try:
            # A page that is not there when it is written to ends the process; here it is an error.
            os.posix_fallocate(self.handle, 0, self.nbytes)
            flags = mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0)
            self.data = torch.frombuffer(mmap.mmap(self.handle, self.nbytes, flags=flags), dtype=torch.uint8)
        except BaseException:
            os.close(self.handle)
            raise
        self._unlock = devices.lock_pages(self.data, device)

    def close(self) -> None:
        self._unlock()
        os.close(self.handle)


def _new_handle() -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create("checkpoint")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def bytes_of_snapshot(tensors: dict[str, LocalTensor]) -> int:
    """The memory for a copy of what this rank writes."""
    return sum(_aligned(nbytes) for local in tensors.values() for _, nbytes in _written(local))


def snapshot(tensors: dict[str, LocalTensor], memory: Tensor) -> list[list[Any]]:
    """Copies what this rank writes to `memory`, uint8; what `writer.py` has to know of it. The copies of a device's
    tensors are
    complete after its next synchronization."""
    at, listed = 0, []
    with torch.no_grad():
        for name, local in tensors.items():
            pieces = []
            for piece, nbytes in _written(local):
                _copy(local, piece, memory[at : at + nbytes])
                pieces.append([piece[0], at, nbytes])
                at += _aligned(nbytes)
            listed.append([name, local.dtype, list(local.shape), local.is_writer, pieces])
    return listed


def _written(local: LocalTensor) -> list[tuple[Any, int]]:
    """The pieces that this rank writes, with their bytes."""
    if not local.is_writer:
        return []
    return [(piece, prod(size_of(piece[0])) * local.tensor.dtype.itemsize) for piece in local.pieces]


def _copy(local: LocalTensor, piece: Any, room: Tensor) -> None:
    source = local.region(piece)
    if isinstance(source, StoredTensor):
        for part, values in zip(room.split(_CHUNK), source.parts(_CHUNK), strict=True):
            part.copy_(values.start_reading().wait().reshape(-1).view(torch.uint8))
    else:
        room.view(source.dtype).view(source.shape).copy_(source, non_blocking=True)


def _aligned(nbytes: int) -> int:
    return nbytes + -nbytes % format.ALIGNMENT


# ---------------------------------------------------------------- this rank's writer


def _work_of(process: int) -> list[str]:
    """What a process has done so far: bytes read and written, processor time. Empty where the system does not tell."""
    with contextlib.suppress(OSError):
        counters = Path(f"/proc/{process}/io").read_text()
        return [counters, *Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[11:13]]
    return []


class _Flying(NamedTuple):
    root: str
    iteration: int
    began: float


class BackgroundSaves:
    """The process that writes this rank's part, and the save that is in flight. At most one is."""

    def __init__(self, world: Axis, device: torch.device | str = "cpu"):
        """Starts the processes. Every rank of `world` must call; device: where ranks agree."""
        self._world, self._device = world, device
        self._memory: SharedMemory | None = None
        self._flying: _Flying | None = None
        with collectives.raise_together(world, device):
            self._start_process()
            hello = {"rank": world.rank, "ranks": world.size, "address": None}
            if world.is_first:
                self._writer.send(hello)
                hello |= self._answer()
        text = collectives.broadcast_text(json.dumps(hello), world, device)
        with collectives.raise_together(world, device):
            if not world.is_first:
                self._writer.send(json.loads(text) | {"rank": world.rank})
        with collectives.raise_together(world, device):
            self._answer()

    def _start_process(self) -> None:
        mine, its = socket.socketpair()
        with its:
            self._process = writer_process.start_process(its)
        self._writer = Messages(mine)

    def reserve(self, tensors: dict[str, LocalTensor]) -> None:
        """Memory for a copy of what this rank writes of `tensors`, unless there is as much."""
        nbytes = bytes_of_snapshot(shares(tensors))
        if self._memory is not None and self._memory.nbytes >= nbytes:
            return
        if self._memory is not None:
            self._memory.close()
            self._memory = None
        try:
            self._memory = SharedMemory(nbytes, self._device)
        except OSError as error:
            gib = nbytes / (1 << 30)
            advice = "leave --async-save out, or use more ranks of data parallelism, which divide it"
            raise CheckpointError("--async-save", f"needs {gib:.1f} GiB of host memory ({error})", advice) from error

    def start(self, root: Path | str, iteration: int, tensors: dict[str, LocalTensor], state: dict[str, Any]) -> float:
        """Copies `tensors` and returns the seconds that took; `finish` must have been called. Every rank must call.
        `state` is
        that of the first rank."""
        assert self._flying is None, "one save at a time"
        began, saving = time.monotonic(), Saving(path_of(root), iteration, state, print)
        with collectives.raise_together(self._world, self._device):
            check_savable(saving, tensors, is_first=self._world.is_first)
            self.reserve(tensors)
        parts = snapshot(shares(tensors), self._memory.data)
        devices.finish_copies(self._device)
        job = {"root": str(root), "iteration": iteration, "parts": parts}
        with contextlib.suppress(OSError):  # the writer is gone: its answer says so
            self._writer.send(job | {"state": state if self._world.is_first else {}}, self._memory.handle)
        self._flying = _Flying(str(root), iteration, began)
        return time.monotonic() - began

    @property
    def in_flight(self) -> int | None:
        """The iteration that is being saved."""
        return None if self._flying is None else self._flying.iteration

    def poll(self) -> SavedInBackground | None:
        """A save that has ended since the last call. Raises its error if it failed. Any rank may call alone."""
        ended = self._flying is not None and select.select([self._writer.line], [], [], 0)[0]
        return self.land() if ended else None

    def finish(self) -> SavedInBackground | None:
        """Waits for the save in flight on every rank, and raises its error if it failed. Every rank must call."""
        with collectives.raise_together(self._world, self._device):
            return self.land()

    def land(self) -> SavedInBackground | None:
        """`finish` of this rank alone."""
        if self._flying is None:
            return None
        flying, self._flying = self._flying, None
        warnings = self._answer()["warnings"]
        return SavedInBackground(flying.iteration, flying.root, time.monotonic() - flying.began, warnings)

    def _answer(self) -> dict[str, Any]:
        """The writer's next message. Raises its error, or that of another rank's."""
        did = None
        while not select.select([self._writer.line], [], [], _LOOKS_EVERY)[0]:
            if (does := _work_of(self._process.pid)) != did:
                rank_status.heartbeat()  # a slow disk is no rank that hangs
            did = does
        try:
            answer = self._writer.receive()
        except ConnectionError as error:
            code = self._process.wait()
            wrong, advice = f"lost the process that writes (exit code {code})", "see what the system says of it"
            raise CheckpointError("--async-save", wrong, advice) from error
        if "elsewhere" in answer:
            raise collectives.PeerError(answer["elsewhere"])
        if "failed" in answer:
            raise CheckpointError(*answer["failed"])
        return answer

    def close(self) -> None:
        """Ends the process, and the save in flight with it. Any rank may call alone."""
        self._writer.close()
        self._process.wait()
        if self._memory is not None:
            self._memory.close()
            self._memory = None
