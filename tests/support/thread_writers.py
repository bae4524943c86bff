"""The processes that write checkpoints, as threads of this one: a double of the file layer then sees their calls.

with thread_writers(): AsyncSaver(world)        the writer of rank 3 is a thread of the name that rank 3 has, as
                                                     `local_ranks.rank_of_thread` tells
"""

import contextlib
import os
import socket
import threading
from collections.abc import Iterator

from local_ranks import rank_of_thread

from megatron.core.dist_checkpointing import writer_process
from megatron.core.dist_checkpointing.async_snapshot_to_writer_process import AsyncSaver, AsyncSaveResult
from megatron.core.dist_checkpointing.sockets_between_writers import MessageSocket
from megatron.core.parallel import collectives


class _Thread(threading.Thread):
    """`serve` at the other end of a socket, with the part of Popen's interface that is used."""

    def __init__(self, its: socket.socket):
        super().__init__(name=f"rank {rank_of_thread()}", daemon=True)
        self.pid = os.getpid()
        self._line = socket.socket(fileno=os.dup(its.fileno()))
        self.start()

    def run(self) -> None:
        messages = MessageSocket(self._line)
        try:
            writer_process.serve(messages)
        except BaseException:  # the rank has hung up, or a double has killed the writer
            messages.close()

    def wait(self) -> int:
        self.join(20)
        return -9


@contextlib.contextmanager
def thread_writers() -> Iterator[None]:
    before = writer_process.start_process, AsyncSaver.finish
    writer_process.start_process, AsyncSaver.finish = _Thread, _finish
    try:
        yield
    finally:
        writer_process.start_process, AsyncSaver.finish = before


_usual = AsyncSaver.finish


def _finish(saves: AsyncSaver) -> AsyncSaveResult | None:
    """A rank that waits for its writer lets no other rank run: all must have told theirs what to write."""
    collectives.barrier(saves._world)
    return _usual(saves)
