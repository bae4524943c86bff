"""The process beside a rank that writes its checkpoints while the rank goes on training. No torch.

    the rank, to its writer    {"rank": 0, "ranks": 4}
    the writer of rank 0       {"address": ...}
    a rank                     {"rank": 3, "ranks": 4, "address": ...}
    every writer               {"ready": true}
    a rank                     {"root": ..., "iteration": ..., "state": ..., "parts": ...}, and the handle of the memory
    every writer               {"done": 100, "warnings": [...]}, or {"failed": [file, wrong, advice], "elsewhere": ...}

The process is a new interpreter, not a fork: it has none of the rank's threads, locks and devices. It ignores
the signals that end a job, as a rank that ends in order waits for the save in flight. It ends when its rank
does, in order or not.
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
from megatron.core.base import tolerate_broken_output
from megatron.core.dist_checkpointing.manifest_format import CheckpointError
from megatron.core.dist_checkpointing.sockets_between_writers import (
    FirstWriterServer,
    MessageSocket,
    OtherRankError,
    WriterGroup,
    connect_to_first_writer,
)
from megatron.core.dist_checkpointing.write_and_publish import SaveRequest, TensorToWrite, write_and_publish
from megatron.core.storage.path_or_url import path_of

_CHUNK = 16 << 20  # bytes hashed and written at a time
_POLL_SECONDS = 0.1  # between two looks at whether the rank is alive
_PR_SET_PDEATHSIG = 1  # Linux: the signal that a process gets when its parent ends
_IGNORED_SIGNALS = ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2")

# The new interpreter finds the rank's package even where it is not installed and the working folder is another.
_PACKAGE_PARENT = str(Path(megatron.__file__).absolute().parent.parent)
_START = f"import sys; sys.path.insert(0, sys.argv[2]); from {__name__} import main; main(int(sys.argv[1]))"


def start_process(line: socket.socket) -> subprocess.Popen:
    """Start a writer that listens to the socket `line`, whose other end the rank keeps."""
    command = [sys.executable, "-c", _START, str(line.fileno()), _PACKAGE_PARENT]
    return subprocess.Popen(command, pass_fds=[line.fileno()], stdin=subprocess.DEVNULL)


def main(handle: int) -> None:
    """Run the writer until its rank ends. handle: of the socket to the rank."""
    tolerate_broken_output.keep_running()  # a save must end even if nobody reads the job's output any more
    for name in _IGNORED_SIGNALS:
        signal.signal(getattr(signal, name), signal.SIG_IGN)
    _kill_when_rank_ends()
    threading.Thread(target=_exit_when_orphaned, args=(os.getppid(),), daemon=True).start()
    with contextlib.suppress(ConnectionError):  # the rank has ended
        serve(MessageSocket(socket.socket(fileno=handle)))
    os._exit(0)


def _kill_when_rank_ends() -> None:
    """Ask Linux to kill this process when the rank's thread that started it ends, even if this process is stopped."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _exit_when_orphaned(parent: int) -> None:
    """End this process when the rank has ended, on systems without PR_SET_PDEATHSIG.

    A closed socket does not show it: another process of a killed rank may still hold the rank's end open. The parent's
    process id does change.
    """
    while os.getppid() == parent:
        time.sleep(_POLL_SECONDS)
    os._exit(1)


def serve(rank: MessageSocket) -> None:
    """Write each save that the rank sends, until it hangs up; that raises ConnectionError."""
    try:
        writers = _connect_writers(rank)
    except OSError as error:
        wrong = f"has no way between the processes that write ({error})"
        rank.send({"failed": ["--async-save", wrong, "leave it out"]})
        raise ConnectionError(str(error)) from error
    rank.send({"ready": True})
    try:
        while True:
            job = rank.receive()
            rank.send(_write_job(job, rank.handles.pop(), writers))
    finally:
        writers.close()


def _connect_writers(rank: MessageSocket) -> WriterGroup:
    """Connect to the other ranks' writers. Writer 0 tells its rank the address, which the ranks pass on."""
    hello = rank.receive()
    if hello["rank"]:
        return connect_to_first_writer(hello["address"], hello["rank"])
    server = FirstWriterServer()
    rank.send({"address": server.address})
    return server.accept_all(hello["ranks"])


def _write_job(job: dict[str, Any], handle: int, writers: WriterGroup) -> dict[str, Any]:
    """Write one save; return the answer to the rank. handle: of the memory with the snapshot."""
    warnings: list[str] = []
    try:
        with _mapped(handle) as memory:
            request = SaveRequest(path_of(job["root"]), job["iteration"], job["state"], warnings.append)
            write_and_publish(request, _write_items(job["parts"], memory), writers)
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
    """Map the memory behind a handle, which is closed at the end."""
    try:
        nbytes = os.fstat(handle).st_size
        memory = mmap.mmap(handle, nbytes, prot=mmap.PROT_READ)
        yield memoryview(memory)
    finally:
        os.close(handle)  # the map itself is freed with the last buffer that views it


def _write_items(listed: list[list[Any]], memory: memoryview) -> dict[str, TensorToWrite]:
    """Return the tensors that `async_save.snapshot` has listed; their elements are in `memory`."""
    items = {}
    for name, dtype, shape, is_writer, listed_pieces in listed:
        pieces = []
        for box, offset, nbytes in listed_pieces:
            box = tuple(map(tuple, box))  # JSON has made lists of the tuples
            pieces.append((box, partial(_buffers, memory[offset : offset + nbytes])))
        items[name] = TensorToWrite(dtype, tuple(shape), is_writer, pieces)
    return items


def _buffers(piece: memoryview) -> Iterator[memoryview]:
    for start in range(0, len(piece), _CHUNK):
        yield piece[start : start + _CHUNK]
