"""Atomic files: written under a temporary name in the same folder, synced, then renamed."""

import contextlib
import errno
import fnmatch
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from megatron.core.storage.file_layer import local
from megatron.core.storage.file_lock import locked

_DAY_SECONDS = 24 * 3600


def is_special(path: str | Path) -> bool:
    """Return whether the path is a device, a pipe or a socket.

    Renaming a file to it would take it from all programs.
    """
    return os.path.exists(path) and not os.path.isfile(path) and not os.path.isdir(path)


class UnpublishedFile:
    """A file under a temporary name beside `path`, removed at the end of the block unless `publish` renames it.

    The writer holds a lock until its process ends; by that `remove_abandoned` recognizes the file of a dead process.
    """

    def __init__(self, path: str | Path):
        self.path = path

    def __enter__(self) -> "UnpublishedFile":
        if is_special(self.path):
            raise OSError(errno.EINVAL, "It is not a regular file, so it cannot be replaced", str(self.path))
        while True:
            self.temporary = f"{self.path}.{_host()}-{os.getpid()}-{os.urandom(4).hex()}.tmp"
            self.file = open(self.temporary, "x+b")
            with contextlib.suppress(OSError):  # a file system without locks
                locked(self.file)
            has_name = os.fstat(self.file.fileno()).st_nlink > 0
            if has_name:
                return self
            # Another process has removed it as abandoned before it was locked: try again.
            self.file.close()

    def __exit__(self, *_: object) -> None:
        try:
            self.file.close()  # flushes, which may fail on a full disk
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.remove(self.temporary)

    def publish(self) -> None:
        """Sync the content, rename the file to `path`, and sync the folder: the file survives a power loss."""
        self.file.flush()
        os.fsync(self.file.fileno())
        os.replace(self.temporary, self.path)
        local.sync_folder(Path(self.path).resolve().parent)

    def chunks(self, size: int) -> Iterator[bytes]:
        """Yield the content so far, `size` bytes at a time."""
        self.file.seek(0)
        while chunk := self.file.read(size):
            yield chunk


@contextlib.contextmanager
def atomic_file(path: str | Path) -> Iterator[BinaryIO]:
    """Open a file that appears under `path` when the block ends without an error."""
    with UnpublishedFile(path) as unpublished:
        yield unpublished.file
        unpublished.publish()


def remove_abandoned(folder: str | Path, pattern: str = "*") -> None:
    """Remove temporary files of `folder` that match `pattern` and whose writer was killed: no process holds their lock.

    Not every file system shares locks between hosts, so a file of another host must also be a day old. Errors are
    ignored.
    """
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        temporary = [entry.name for entry in entries if entry.name.endswith(".tmp")]
        for name in fnmatch.filter(temporary, pattern):
            with contextlib.suppress(OSError), open(Path(folder, name), "r+b") as file:
                is_of_this_host = f".{_host()}-" in name
                is_old = time.time() - os.fstat(file.fileno()).st_mtime > _DAY_SECONDS
                if (is_of_this_host or is_old) and locked(file):
                    os.remove(file.name)


def _host() -> str:
    return socket.gethostname().split(".")[0][:40]
