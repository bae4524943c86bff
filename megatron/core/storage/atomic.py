"""Files that appear under their name complete, or not at all: written beside it under a temporary name, synced, renamed."""

import contextlib
import fnmatch
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from megatron.core.storage.locks import locked

_A_DAY = 24 * 3600  # seconds


class UnpublishedFile:
    """A file under a temporary name beside `path`. At the end of the block it is gone unless `publish` has renamed it.

    Its writer holds a lock on it, which ends with the process: so `remove_abandoned` recognizes the file of a dead process.
    """

    def __init__(self, path: str | Path):
        self.path = path

    def __enter__(self) -> "UnpublishedFile":
        while True:
            self.temporary = f"{self.path}.{_host()}-{os.getpid()}-{os.urandom(4).hex()}.tmp"
            self.file = open(self.temporary, "x+b")
            with contextlib.suppress(OSError):  # a file system without locks
                locked(self.file)
            if os.fstat(self.file.fileno()).st_nlink:
                return self
            self.file.close()  # removed as abandoned, between its making and its lock

    def __exit__(self, *_: object) -> None:
        try:
            self.file.close()  # which may write the rest of a buffer, and fail on a full disk
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.remove(self.temporary)

    def publish(self) -> None:
        """Give the file its name once its content is on disk. The rename itself survives a power loss too."""
        sync_file(self.file)
        os.replace(self.temporary, self.path)
        sync_folder(Path(self.path).resolve().parent)

    def chunks(self, size: int) -> Iterator[bytes]:
        """The content so far, `size` bytes at a time."""
        self.file.seek(0)
        while some := self.file.read(size):
            yield some


@contextlib.contextmanager
def atomic_file(path: str | Path) -> Iterator[BinaryIO]:
    """A file that appears under `path`, complete, when the block ends; after an error it does not."""
    with UnpublishedFile(path) as unpublished:
        yield unpublished.file
        unpublished.publish()


def remove_abandoned(folder: str | Path, pattern: str = "*") -> None:
    """Remove the temporary files of `folder` whose name fits `pattern` and whose writer was killed.

    That is a file on which nobody holds a lock. Between hosts not every file system keeps locks, so another host's file
    must also be a day old. Where nothing can be locked or removed, nothing is.
    """
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for name in fnmatch.filter((entry.name for entry in entries if entry.name.endswith(".tmp")), pattern):
            with contextlib.suppress(OSError), open(Path(folder, name), "r+b") as file:
                is_ours = f".{_host()}-" in name
                is_old = time.time() - os.fstat(file.fileno()).st_mtime > _A_DAY
                if (is_ours or is_old) and locked(file):
                    os.remove(file.name)


def _host() -> str:
    return socket.gethostname().split(".")[0][:40]


def sync_file(file: BinaryIO) -> None:
    """Put the content on the disk; its name is there once `sync_folder` has returned."""
    file.flush()
    os.fsync(file.fileno())


def write_synced(path: Path, text: str) -> None:
    """A file that is on the disk when this returns; its name is once `sync_folder` has."""
    with open(path, "wb") as file:
        file.write(text.encode())
        sync_file(file)


def sync_folder(folder: Path) -> None:
    """Make the names in a folder durable; a rename is not until its folder is synced."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # some network file systems cannot sync folders: then their server orders it
            os.fsync(handle)
    finally:
        os.close(handle)
