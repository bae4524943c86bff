"""Asynchronous saves: training waits for a copy of its state in host memory.

A process of each rank writes and publishes it.

    saver = AsyncSaver(world, device)             starts a process for each rank
    saver.start(root, 100, tensors, state)        copies and returns; `finish` must have ended the save before
    saver.poll()                                  at every step: the save that has ended, or the error of a failed one
    saver.finish()                                waits for the save in flight

The copy is in memory shared with the process, allocated once, and page-locked for fast copies if the state is
on an accelerator.
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
from megatron.core.dist_checkpointing import manifest_format, writer_process
from megatron.core.dist_checkpointing.local_tensor import LocalTensor
from megatron.core.dist_checkpointing.manifest_format import CheckpointError
from megatron.core.dist_checkpointing.save_sharded import check_tensors_and_state
from megatron.core.dist_checkpointing.sockets_between_writers import MessageSocket
from megatron.core.dist_checkpointing.write_and_publish import SaveRequest
from megatron.core.dist_checkpointing.write_balance import balance_writes
from megatron.core.offload.tensor_in_memory_or_file import StoredTensor
from megatron.core.parallel import accelerator as devices, collectives
from megatron.core.parallel.rank_grid import Axis
from megatron.core.sharding.boxes import Box, size_of
from megatron.core.storage.path_or_url import path_of

_CHUNK = 16 << 20  # bytes of a tensor in a file that are read at a time
_PROGRESS_SECONDS = 1.0  # between two looks at whether a slow writer still makes progress


class AsyncSaveResult(NamedTuple):
    """A checkpoint that is on disk and is the latest."""

    iteration: int
    root: str
    durable: float  # seconds from the start of the save until it was the latest
    warnings: list[str]


# ---------------------------------------------------------------- the copy


class SharedMemory:
    """Host memory that another process may map.

    The system frees it when no process holds it any more, killed or not.
    """

    def __init__(self, nbytes: int, device: torch.device | str = "cpu"):
        """Allocate `nbytes` now. device: of the tensors that are copied there.

        Raises OSError if there is not enough.
        """
        self.nbytes = max(nbytes, 1)
        self.handle = _new_handle()
        try:
            # Allocate every page now: a page that is missing when it is written to would end the process.
            os.posix_fallocate(self.handle, 0, self.nbytes)
            flags = mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0)
            mapped = mmap.mmap(self.handle, self.nbytes, flags=flags)
            self.data = torch.frombuffer(mapped, dtype=torch.uint8)  # [nbytes]
        except BaseException:
            os.close(self.handle)
            raise
        self._unlock = devices.lock_pages(self.data, device)

    def close(self) -> None:
        """Give the memory back; a process that has mapped it keeps it until it ends."""
        self._unlock()
        os.close(self.handle)


def _new_handle() -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create("checkpoint")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def snapshot_bytes(tensors: dict[str, LocalTensor]) -> int:
    """Return the bytes of memory that `snapshot` needs for what this rank writes.

    tensors: name -> this rank's part, as `LocalTensor` has it.
    """
    return sum(_aligned(nbytes) for local in tensors.values() for _, nbytes in _pieces_to_write(local))


def snapshot(tensors: dict[str, LocalTensor], memory: Tensor) -> list[list[Any]]:
    """Copy what this rank writes to `memory` [nbytes, uint8]; return a JSON list of what is where, for the writer.

    tensors: name -> this rank's part, as `LocalTensor` has it. Copies of an accelerator's tensors are complete only
    after its next synchronization.
    """
    listed = []
    offset = 0
    with torch.no_grad():
        for name, local in tensors.items():
            pieces = []
            for piece, nbytes in _pieces_to_write(local):
                _copy_piece(local, piece, memory[offset : offset + nbytes])
                global_box = piece[0]
                pieces.append([global_box, offset, nbytes])
                offset += _aligned(nbytes)
            listed.append([name, local.dtype, list(local.shape), local.is_writer, pieces])
    return listed


def _pieces_to_write(local: LocalTensor) -> list[tuple[tuple[Box, Box], int]]:
    """Return the pieces that this rank writes, each with its bytes."""
    if not local.is_writer:
        return []
    itemsize = local.tensor.dtype.itemsize
    return [(piece, prod(size_of(piece[0])) * itemsize) for piece in local.pieces]


def _copy_piece(local: LocalTensor, piece: tuple[Box, Box], target: Tensor) -> None:
    """Copy a piece to `target` [bytes of the piece, uint8]."""
    source = local.region(piece)
    if isinstance(source, StoredTensor):
        for chunk, values in zip(target.split(_CHUNK), source.parts(_CHUNK), strict=True):
            chunk.copy_(values.start_reading().wait().reshape(-1).view(torch.uint8))
    else:
        target.view(source.dtype).view(source.shape).copy_(source, non_blocking=True)


def _aligned(nbytes: int) -> int:
    return nbytes + -nbytes % manifest_format.ALIGNMENT


# ---------------------------------------------------------------- this rank's writer


def _activity(process: int) -> list[str]:
    """Return counters of a process's bytes read and written and processor time; empty where the system has none."""
    with contextlib.suppress(OSError):
        io_counters = Path(f"/proc/{process}/io").read_text()
        cpu_ticks = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[11:13]  # utime, stime
        return [io_counters, *cpu_ticks]
    return []


class _SaveInFlight(NamedTuple):
    root: str
    iteration: int
    started: float  # time.monotonic()


class AsyncSaver:
    """The process that writes this rank's part, and the save in flight; there is at most one."""

    def __init__(self, world: Axis, device: torch.device | str = "cpu"):
        """Start the processes. Every rank of `world` must call. device: where the ranks' collectives communicate."""
        self._world = world
        self._device = device
        self._memory: SharedMemory | None = None
        self._in_flight: _SaveInFlight | None = None

        # start this rank's writer; the first rank's listens for the others
        with collectives.raise_together(world, device):
            self._start_process()
            hello = {"rank": world.rank, "ranks": world.size, "address": None}
            if world.is_first:
                self._writer.send(hello)
                hello |= self._answer()

        # tell the other writers its address
        text = collectives.broadcast_text(json.dumps(hello), world, device)
        with collectives.raise_together(world, device):
            if not world.is_first:
                self._writer.send(json.loads(text) | {"rank": world.rank})

        # wait until all writers have connected
        with collectives.raise_together(world, device):
            self._answer()

    def _start_process(self) -> None:
        own_end, writer_end = socket.socketpair()
        with writer_end:
            self._process = writer_process.start_process(writer_end)
        self._writer = MessageSocket(own_end)

    def reserve(self, tensors: dict[str, LocalTensor]) -> None:
        """Allocate memory for a copy of what this rank writes of `tensors`, unless there is enough already.

        tensors: name -> this rank's part, as `LocalTensor` has it. Raises OSError if there is not enough memory.
        """
        nbytes = snapshot_bytes(balance_writes(tensors))
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
        """Copy `tensors` and start the save; return the seconds that training waited. Every rank must call.

        `finish` must have ended the save before. `state` is plain JSON; the first rank's is saved. tensors: name ->
        this rank's part, as `LocalTensor` has it. All ranks together have every element of each tensor.
        """
        assert self._in_flight is None, "one save at a time"
        started = time.monotonic()

        # check, and allocate memory, on all ranks
        request = SaveRequest(path_of(root), iteration, state, print)
        with collectives.raise_together(self._world, self._device):
            check_tensors_and_state(request, tensors, is_first=self._world.is_first)
            self.reserve(tensors)

        # copy: the state may change as soon as this returns
        parts = snapshot(balance_writes(tensors), self._memory.data)
        devices.finish_copies(self._device)

        # hand it to the writer
        job = {"root": str(root), "iteration": iteration, "parts": parts}
        job["state"] = state if self._world.is_first else {}
        with contextlib.suppress(OSError):  # the writer is gone: `poll` or `finish` reports that
            self._writer.send(job, self._memory.handle)
        self._in_flight = _SaveInFlight(str(root), iteration, started)
        return time.monotonic() - started

    @property
    def in_flight(self) -> int | None:
        """The iteration that is being saved; None without a save in flight."""
        return None if self._in_flight is None else self._in_flight.iteration

    def poll(self) -> AsyncSaveResult | None:
        """Return the save that has ended since the last call. Raises its error if it failed.

        Any rank may call alone.
        """
        if self._in_flight is None or not self._has_message(0):
            return None
        return self.finish_own_part()

    def finish(self) -> AsyncSaveResult | None:
        """Wait for the save in flight on every rank. Raises its error if it failed. Every rank must call."""
        with collectives.raise_together(self._world, self._device):
            return self.finish_own_part()

    def finish_own_part(self) -> AsyncSaveResult | None:
        """Wait for this rank's writer alone, as `finish` does for all. Any rank may call alone."""
        if self._in_flight is None:
            return None
        save = self._in_flight
        self._in_flight = None
        warnings = self._answer()["warnings"]
        return AsyncSaveResult(save.iteration, save.root, time.monotonic() - save.started, warnings)

    def _has_message(self, timeout: float) -> bool:
        readable, _, _ = select.select([self._writer.line], [], [], timeout)
        return bool(readable)

    def _answer(self) -> dict[str, Any]:
        """Wait for the writer's next message. Raises its error: CheckpointError, or PeerError for another rank's."""
        # wait, and report progress while the writer makes any: a slow disk is no rank that hangs
        before = None
        while not self._has_message(_PROGRESS_SECONDS):
            now = _activity(self._process.pid)
            if now != before:
                rank_status.heartbeat()
            before = now

        try:
            answer = self._writer.receive()
        except ConnectionError as error:
            code = self._process.wait()
            wrong = f"lost the process that writes (exit code {code})"
            raise CheckpointError("--async-save", wrong, "see what the system says of it") from error
        if "elsewhere" in answer:
            raise collectives.PeerError(answer["elsewhere"])
        if "failed" in answer:
            raise CheckpointError(*answer["failed"])
        return answer

    def close(self) -> None:
        """End the process, and the save in flight with it. Any rank may call alone."""
        self._writer.close()
        self._process.wait()
        if self._memory is not None:
            self._memory.close()
            self._memory = None
