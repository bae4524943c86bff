"""The process beside a rank that writes its checkpoints while the rank trains on. No torch.

    the rank, to its writer    {"rank": 0, "ranks": 4}
    the writer of rank 0       {"address": ...}
    a rank                     {"rank": 3, "ranks": 4, "address": ...}
    every writer               {"ready": true}
    a rank                     {"root": ..., "iteration": ..., "state": ..., "parts": ...}, and the handle of the memory
    every writer               {"done": 100, "warnings": [...]}, or {"failed": [file, wrong, advice], "elsewhere": ...}

A new interpreter, so that nothing of the rank's threads, locks and devices is in it. Signals that end a job do not end
it, as
a rank that ends in order waits for the save in flight. It ends when its rank does, in order or not.
"""

import contextlib
import ctypes
import mmap
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import megatron
from megatron.core.base import output_streams
from megatron.core.dist_checkpointing.format import CheckpointError
from megatron.core.dist_checkpointing.write_and_publish import HeldPart, Saving, write_and_publish
from megatron.core.dist_checkpointing.writer_sockets import Messages, Middle, OtherRankError, Star, join
from megatron.core.storage.paths import path_of

_CHUNK = 16 << 20  # bytes hashed and written at a time
_LOOKS_EVERY = 0.1  # seconds, whether the rank lives
_PR_SET_PDEATHSIG = 1  # of Linux
_IGNORED = ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2")

# The new interpreter finds the rank's package even where it is not installed and the working folder is another.
_PACKAGE_PARENT = str(Path(megatron.__file__).absolute().parent.parent)
_START = f"import sys; sys.path.insert(0, sys.argv[2]); from {__name__} import main; main(int(sys.argv[1]))"


def start_process(its: socket.socket) -> subprocess.Popen:
    """The process at the other end of the socket `its`."""
    command = [sys.executable, "-c", _START, str(its.fileno()), _PACKAGE_PARENT]
    return subprocess.Popen(command, pass_fds=[its.fileno()], stdin=subprocess.DEVNULL)


def main(handle: int) -> None:
    output_streams.keep_running()  # nobody may read what the job prints any more, and the save must end
    for name in _IGNORED:
        signal.signal(getattr(signal, name), signal.SIG_IGN)
    _be_killed_with_the_rank()
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    with contextlib.suppress(ConnectionError):  # the rank has ended
        serve(Messages(socket.socket(fileno=handle)))
    os._exit(0)


def _be_killed_with_the_rank() -> None:
    """On Linux, as soon as the rank's thread that started this process ends, and even where this process is stopped."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _end_with(parent: int) -> None:
    """Elsewhere. A rank that was killed closes nothing here that another process of it may hold open; but the parent's
    number
    changes."""
    while os.getppid() == parent:
        time.sleep(_LOOKS_EVERY)
    os._exit(1)


def serve(rank: Messages) -> None:
    """Writes what the rank sends until it hangs up, which raises ConnectionError."""
    try:
        ranks = _meet(rank)
    except OSError as error:
        rank.send(
            {"failed": ["--async-save", f"has no way between the processes that write ({error})", "leave it out"]}
        )
        raise ConnectionError(str(error)) from error
    rank.send({"ready": True})
    try:
        while True:
            job = rank.receive()
            rank.send(_answer(job, rank.handles.pop(), ranks))
    finally:
        ranks.close()


def _meet(rank: Messages) -> Star:
    hello = rank.receive()
    if hello["rank"]:
        return join(hello["address"], hello["rank"])
    middle = Middle()
    rank.send({"address": middle.address})
    return middle.meet(hello["ranks"])


def _answer(job: dict[str, Any], handle: int, ranks: Star) -> dict[str, Any]:
    warnings: list[str] = []
    try:
        with _mapped(handle) as memory:
            saving = Saving(path_of(job["root"]), job["iteration"], job["state"], warnings.append)
            write_and_publish(saving, _parts(job["parts"], memory), ranks)
    except CheckpointError as error:
        return {"failed": [str(error.file), error.wrong, error.advice]}
    except OtherRankError as error:
        return {"failed": [job["root"], "was not written", str(error)], "elsewhere": str(error)}
    except Exception as error:
        traceback.print_exc(file=sys.stderr)
        return {"failed": [job["root"], f"was not written ({error!r})", "see the traceback above"]}
    return {"done": job["iteration"], "warnings": warnings}


@contextlib.contextmanager
def _mapped(handle: int) -> Iterator[memoryview]:
    """The memory behind a handle, which is closed at the end."""
    try:
        nbytes = os.fstat(handle).st_size
        memory = mmap.mmap(handle, nbytes, prot=mmap.PROT_READ)
        yield memoryview(memory)
    finally:
        os.close(handle)  # the map goes with the last buffer that is a view of it


def _parts(listed: list[list[Any]], memory: memoryview) -> dict[str, HeldPart]:
    return {
        name: HeldPart(
            dtype,
            tuple(shape),
            is_writer,
            [(tuple(map(tuple, box)), partial(_buffers, memory[at : at + nbytes])) for box, at, nbytes in pieces],
        )
        for name, dtype, shape, is_writer, pieces in listed
    }


def _buffers(piece: memoryview) -> Iterator[memoryview]:
    for at in range(0, len(piece), _CHUNK):
        yield piece[at : at + _CHUNK]
