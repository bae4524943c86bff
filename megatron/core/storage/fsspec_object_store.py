"""Object stores behind the file layer's methods, by way of fsspec. No torch; fsspec is imported with the first URL.

An object store differs from a file system; code that writes checkpoints must allow for that (object_store_commit.py):

    an object appears complete, when its file is closed without an error; it replaces an existing one in that instant
    nothing can be renamed or locked, and a folder is only a common prefix of names
    a network error says nothing about the bytes that are stored

An object of up to `PART` bytes is one request. A longer one is sent in parts as it is written, so a writer holds one or
two parts in memory. Nothing is cached, as another process may have changed the store since.
"""

import contextlib
import errno
import os
import threading
from collections.abc import Iterable, Iterator
from typing import Any

from megatron.core.storage.object_store_read_ahead import ReadAhead
from megatron.core.storage.path_or_url import ObjectPath, Stat

PART = 32 << 20  # bytes; S3 allows 10,000 parts for an object, so 312 GiB of a rank's state
_REMOTE = getattr(errno, "EREMOTEIO", errno.EBUSY)
_NOT_PASSED_ON = (None, errno.EIO)  # EIO would mean a disk that has lost its bytes (`format.advice_after`)


@contextlib.contextmanager
def _os_errors_of(path: ObjectPath) -> Iterator[None]:
    """Turn any error of the store or the network into an OSError with its number, its text and `path`."""
    try:
        yield
    except (FileNotFoundError, PermissionError) as error:
        number = errno.ENOENT if isinstance(error, FileNotFoundError) else errno.EACCES
        raise OSError(number, str(error.strerror or error), str(path)) from error
    except Exception as error:
        number = getattr(error, "errno", None)
        text = str(getattr(error, "strerror", None) or error) or type(error).__name__
        if number in _NOT_PASSED_ON:
            number = _REMOTE
        raise OSError(number, text, str(path)) from error


class ObjectFiles:
    """The objects of one scheme: the methods of `LocalFiles`, for an `ObjectPath`. All raise OSError."""

    def __init__(self, scheme: str):
        self._scheme = scheme
        self._stores: dict[int, Any] = {}  # by process id: a forked process must not share connections
        self._lock = threading.Lock()

    @property
    def _store(self) -> Any:
        """This process's fsspec file system.

        Settings and credentials are the environment's and those of fsspec's own files.
        """
        with self._lock:
            if os.getpid() not in self._stores:
                import fsspec

                self._stores[os.getpid()] = fsspec.filesystem(self._scheme, use_listings_cache=False)
            return self._stores[os.getpid()]

    def open(self, path: ObjectPath, mode: str) -> Any:
        """Open an object. mode: "rb", "wb", or "xb", which is "wb" here."""
        with _os_errors_of(path):
            return _Reader(self._store, path) if mode == "rb" else _Writer(self._store, path)

    def write(self, file: Any, data: Any) -> int:
        return file.write(data)

    def read_into(self, file: Any, buffer: memoryview) -> int:
        return file.read_into(buffer)

    def sync(self, file: Any) -> None:
        """Do nothing: an object is stored once its file is closed."""

    def sync_folder(self, path: ObjectPath) -> None:
        """Do nothing: the names are those of the objects."""

    def rename(self, source: ObjectPath, target: ObjectPath) -> None:
        raise OSError(errno.ENOTSUP, "nothing is renamed in an object store", str(source))

    def remove(self, path: ObjectPath) -> None:
        with _os_errors_of(path):
            self._store.rm_file(str(path))

    def remove_folder(self, path: ObjectPath) -> None:
        """Do nothing: a folder disappears with its last object."""

    def make_folder(self, path: ObjectPath) -> None:
        """Do nothing: a folder appears with its first object."""

    def names(self, path: ObjectPath) -> list[str]:
        return sorted(self._listing(path))

    def stat(self, path: ObjectPath) -> Stat | None:
        with _os_errors_of(path):
            try:
                info = self._store.info(str(path))
            except FileNotFoundError:
                return None
        is_folder = info["type"] == "directory"
        return Stat(is_folder, not is_folder, info.get("size") or 0)

    def is_link(self, path: ObjectPath) -> bool:
        return False

    def sizes(self, path: ObjectPath) -> dict[str, int]:
        """Return the objects of a folder, name -> bytes, by one listing."""
        listing = self._listing(path)
        return {name: info["size"] for name, info in listing.items() if info["type"] != "directory"}

    def _listing(self, path: ObjectPath) -> dict[str, dict[str, Any]]:
        """Return fsspec's information on everything in a folder, by name; empty for a folder that does not exist."""
        with _os_errors_of(path):
            try:
                infos = self._store.ls(str(path), detail=True)
            except FileNotFoundError:
                return {}
        prefix = self._store._strip_protocol(str(path)).rstrip("/") + "/"
        listing = {}
        for info in infos:
            name = info["name"].rstrip("/").removeprefix(prefix)
            if name and "/" not in name:  # some stores list the folder itself
                listing[name] = info
        return listing

    def remove_all(self, paths: Iterable[ObjectPath]) -> None:
        """Remove objects of one folder, in as few requests as the store allows.

        Raises OSError if any is still there.
        """
        paths = list(paths)
        if not paths:
            return
        folder = paths[0].parent
        with _os_errors_of(folder), contextlib.suppress(FileNotFoundError):  # one of them is gone already
            self._store.rm([str(path) for path in paths])
        listing = self._listing(folder)
        left = [path.name for path in paths if path.name in listing]
        if left:
            raise OSError(errno.EACCES, f"{len(left)} objects cannot be removed, {left[0]} for one", str(folder))


class _Reader:
    """An object that is read by ranges: each by a request of its own, or from the requests of a `ReadAhead`."""

    def __init__(self, store: Any, path: ObjectPath):
        self._store = store
        self._path = path
        self._position = 0
        self.read_ahead: ReadAhead | None = None

    def seek(self, position: int) -> None:
        """Continue at a byte."""
        self._position = position

    def close(self) -> None:
        """Do nothing: there is nothing to close."""

    def fetch(self, start: int, stop: int) -> bytes:
        """Return bytes start:stop, fewer if the object ends before. Any thread may call."""
        if start >= stop:
            return b""
        with _os_errors_of(self._path):  # keyword arguments: their positions differ between stores
            return self._store.cat_file(str(self._path), start=start, end=stop)

    def read_into(self, buffer: memoryview) -> int:
        """Read into the start of `buffer`; return the number of bytes read, 0 at the end of the object."""
        if self.read_ahead is None:
            data = memoryview(self.fetch(self._position, self._position + len(buffer)))
        else:
            data = self.read_ahead.take(self._path, self._position)[: len(buffer)]
        buffer[: len(data)] = data
        self._position += len(data)
        return len(data)

    def __enter__(self) -> "_Reader":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Writer:
    """An object that appears at the end of the block; after an error it does not."""

    def __init__(self, store: Any, path: ObjectPath):
        self._store = store
        self._path = path
        self._buffered = bytearray()  # until the object has more than one part
        self._upload: Any = None  # of an object of several parts
        self._written = 0

    def tell(self) -> int:
        """Return the bytes written so far."""
        return self._written

    def write(self, data: Any) -> int:
        """Write all of `data`; return its bytes."""
        self._written += len(data)
        if self._upload is None and len(self._buffered) + len(data) <= PART:
            self._buffered += data
            return len(data)
        with _os_errors_of(self._path):
            if self._upload is None:
                self._upload = self._store.open(str(self._path), "wb", block_size=PART)
                self._upload.write(self._buffered)
                self._buffered = bytearray()
            self._upload.write(data)
        return len(data)

    def __enter__(self) -> "_Writer":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        is_complete = False
        try:
            if kind is None:
                with _os_errors_of(self._path):
                    if self._upload is None:
                        self._store.pipe_file(str(self._path), bytes(self._buffered))
                    else:
                        self._upload.close()
                is_complete = True
        finally:
            if self._upload is not None and not is_complete:
                self._abort()

    def _abort(self) -> None:
        """Give up the parts that were sent, and mark the upload closed.

        The garbage collector would complete the object otherwise.
        """
        with contextlib.suppress(Exception):
            self._upload.discard()
        with contextlib.suppress(AttributeError):
            self._upload.closed = True
