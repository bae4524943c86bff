"""Object stores behind the file layer's methods, by way of fsspec. No torch; fsspec is loaded with the first URL.

What differs from a file system, and is left to those who write checkpoints (`dist_checkpointing/object_store_commit.py`):

    an object appears whole, when its file is closed without an error; one that is there is replaced in that instant
    nothing is renamed, nothing is locked, and a folder is no more than what names begin with
    an error of the network says nothing of the bytes that are stored

An object of up to `PART` bytes is one request. A longer one is sent in parts as it is written, so a writer holds a part
or two.
Nothing is cached: another process may have changed the store since.
"""

import contextlib
import errno
import os
import threading
from collections.abc import Iterable, Iterator
from typing import Any

from megatron.core.storage.paths import ObjectPath, Stat
from megatron.core.storage.read_ahead import ReadAhead

PART = 32 << 20  # bytes; S3 takes 10,000 parts of an object, so 312 GiB of a rank's state
_REMOTE = getattr(errno, "EREMOTEIO", errno.EBUSY)
_NO_ERRNO_OF_OURS = (None, errno.EIO)  # EIO is a disk that has lost its bytes


@contextlib.contextmanager
def _answering_for(path: ObjectPath) -> Iterator[None]:
    """Any error of the store or on the way to it as an OSError with its number, its text and `path`."""
    try:
        yield
    except (FileNotFoundError, PermissionError) as error:
        number = errno.ENOENT if isinstance(error, FileNotFoundError) else errno.EACCES
        raise OSError(number, str(error.strerror or error), str(path)) from error
    except Exception as error:
        number = getattr(error, "errno", None)
        text = str(getattr(error, "strerror", None) or error) or type(error).__name__
        raise OSError(_REMOTE if number in _NO_ERRNO_OF_OURS else number, text, str(path)) from error


class ObjectFiles:
    """The objects of one scheme: the methods of `LocalFiles`, for an `ObjectPath`. All raise OSError."""

    def __init__(self, scheme: str):
        self._scheme = scheme
        self._stores: dict[int, Any] = {}  # by process: connections are not shared with a forked one
        self._lock = threading.Lock()

    @property
    def _store(self) -> Any:
        """Settings and credentials are those of the environment and of fsspec's own files."""
        with self._lock:
            if os.getpid() not in self._stores:
                import fsspec

                self._stores[os.getpid()] = fsspec.filesystem(self._scheme, use_listings_cache=False)
            return self._stores[os.getpid()]

    def open(self, path: ObjectPath, mode: str) -> Any:
        """mode: "rb", "wb", or "xb", which is "wb" here."""
        with _answering_for(path):
            return _Reader(self._store, path) if mode == "rb" else _Writer(self._store, path)

    def write(self, file: Any, data: Any) -> int:
        return file.write(data)

    def read_into(self, file: Any, buffer: memoryview) -> int:
        return file.read_into(buffer)

    def sync(self, file: Any) -> None:
        """An object is on disk once its file is closed."""

    def sync_folder(self, path: ObjectPath) -> None:
        """Names are those of the objects."""

    def rename(self, source: ObjectPath, target: ObjectPath) -> None:
        raise OSError(errno.ENOTSUP, "nothing is renamed in an object store", str(source))

    def remove(self, path: ObjectPath) -> None:
        with _answering_for(path):
            self._store.rm_file(str(path))

    def remove_folder(self, path: ObjectPath) -> None:
        """It goes with what is in it."""

    def make_folder(self, path: ObjectPath) -> None:
        """It comes with what is in it."""

    def names(self, path: ObjectPath) -> list[str]:
        return sorted(self._listed(path))

    def stat(self, path: ObjectPath) -> Stat | None:
        with _answering_for(path):
            try:
                found = self._store.info(str(path))
            except FileNotFoundError:
                return None
        is_folder = found["type"] == "directory"
        return Stat(is_folder, not is_folder, found.get("size") or 0)

    def is_link(self, path: ObjectPath) -> bool:
        return False

    def sizes(self, path: ObjectPath) -> dict[str, int]:
        """The objects of a folder, name -> bytes, in one listing."""
        listed = self._listed(path)
        return {name: found["size"] for name, found in listed.items() if found["type"] != "directory"}

    def _listed(self, path: ObjectPath) -> dict[str, dict[str, Any]]:
        """What the folder's listing says, by name; empty where nothing is."""
        with _answering_for(path):
            try:
                found = self._store.ls(str(path), detail=True)
            except FileNotFoundError:
                return {}
        own = self._store._strip_protocol(str(path)).rstrip("/")
        listed = {one["name"].rstrip("/").removeprefix(f"{own}/"): one for one in found}
        return {name: one for name, one in listed.items() if name and "/" not in name}

    def remove_all(self, paths: Iterable[ObjectPath]) -> None:
        """Objects of one folder, in as few requests as the store takes. Raises OSError if one of them is still there."""
        if not (paths := list(paths)):
            return
        folder = paths[0].parent
        with _answering_for(folder), contextlib.suppress(FileNotFoundError):  # one that is gone already
            self._store.rm([str(path) for path in paths])
        left = self._listed(folder)
        if still := [path.name for path in paths if path.name in left]:
            raise OSError(errno.EACCES, f"{len(still)} objects cannot be removed, {still[0]} for one", str(folder))


class _Reader:
    """An object that is read by ranges: each by a request of its own, or, of one that is read ahead, from what has come."""

    def __init__(self, store: Any, path: ObjectPath):
        self._store, self._path = store, path
        self._at = 0
        self.ahead: ReadAhead | None = None

    def seek(self, at: int) -> None:
        self._at = at

    def close(self) -> None:
        """There is nothing to close."""

    def fetch(self, start: int, stop: int) -> bytes:
        """These bytes, fewer where the object ends. Any thread may call."""
        if start >= stop:
            return b""
        with _answering_for(self._path):  # by name: not every store has them in the same places
            return self._store.cat_file(str(self._path), start=start, end=stop)

    def read_into(self, buffer: memoryview) -> int:
        if self.ahead is None:
            found = memoryview(self.fetch(self._at, self._at + len(buffer)))
        else:
            found = self.ahead.take(self._path, self._at)[: len(buffer)]
        buffer[: len(found)] = found
        self._at += len(found)
        return len(found)

    def __enter__(self) -> "_Reader":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Writer:
    """An object that appears at the end of the block; after an error nothing does."""

    def __init__(self, store: Any, path: ObjectPath):
        self._store, self._path = store, path
        self._start = bytearray()
        self._upload: Any = None  # of an object of several parts
        self._written = 0

    def tell(self) -> int:
        return self._written

    def write(self, data: Any) -> int:
        self._written += len(data)
        if self._upload is None and len(self._start) + len(data) <= PART:
            self._start += data
            return len(data)
        with _answering_for(self._path):
            if self._upload is None:
                self._upload = self._store.open(str(self._path), "wb", block_size=PART)
                self._upload.write(self._start)
                self._start = bytearray()
            self._upload.write(data)
        return len(data)

    def __enter__(self) -> "_Writer":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        done = False
        try:
            if kind is None:
                with _answering_for(self._path):
                    self._finish()
                done = True
        finally:
            if self._upload is not None and not done:
                self._forget()

    def _finish(self) -> None:
        if self._upload is None:
            self._store.pipe_file(str(self._path), bytes(self._start))
        else:
            self._upload.close()

    def _forget(self) -> None:
        """Parts that were sent are given up, and the garbage collector must not complete the object."""
        with contextlib.suppress(Exception):
            self._upload.discard()
        with contextlib.suppress(AttributeError):
            self._upload.closed = True
