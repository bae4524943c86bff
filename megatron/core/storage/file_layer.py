"""The file layer: every file call of a save and of a load goes through an object with the methods of `LocalFiles`.

No torch.

    backend_of(path)               the object for the file system, or the object store, that holds `path`
    write_and_sync_content, read_start, remove_tree, make_folders, ...        functions made of its calls

A test replaces `local` by an object that fails, stops or cuts short any call; no file call of a checkpoint bypasses it.
To add a file system: a class with the methods of `LocalFiles`. `ObjectFiles` is one, for all object stores of fsspec.
"""

import contextlib
import errno
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from stat import S_ISDIR, S_ISREG
from typing import Any, BinaryIO

from megatron.core.storage.fsspec_object_store import ObjectFiles
from megatron.core.storage.object_store_read_ahead import FileSpan, ReadAhead
from megatron.core.storage.path_or_url import ObjectPath, Stat


class LocalFiles:
    """The file systems that this machine has mounted, with one method for each system call. All raise OSError."""

    def open(self, path: Path, mode: str) -> BinaryIO:
        """Open a file, unbuffered. mode: "rb", "wb", or "xb", which raises FileExistsError if it exists."""
        return open(path, mode, buffering=0)

    def write(self, file: BinaryIO, data: Any) -> int:
        """Write some of `data`, bytes or a buffer; return the number of bytes written."""
        return file.write(data)

    def read_into(self, file: BinaryIO, buffer: memoryview) -> int:
        """Read into the start of `buffer`; return the number of bytes read, 0 at the end of the file."""
        return file.readinto(buffer)  # type: ignore[attr-defined]

    def sync(self, file: BinaryIO) -> None:
        """Wait until the content is on the disk; `sync_folder` does so for the name."""
        os.fsync(file.fileno())

    def sync_folder(self, path: Path) -> None:
        """Wait until the names in a folder are on the disk; a rename is durable only then."""
        handle = os.open(path, os.O_RDONLY)
        try:
            with contextlib.suppress(OSError):  # some network file systems cannot; their server orders renames
                os.fsync(handle)
        finally:
            os.close(handle)

    def rename(self, source: Path, target: Path) -> None:
        """Rename a file, which replaces a file of that name, or a folder, which needs a free name."""
        os.replace(source, target)

    def remove(self, path: Path) -> None:
        """Remove a file or a link."""
        os.unlink(path)

    def remove_folder(self, path: Path) -> None:
        """Remove an empty folder."""
        os.rmdir(path)

    def make_folder(self, path: Path) -> None:
        """Make a folder in an existing one."""
        os.mkdir(path)

    def names(self, path: Path) -> list[str]:
        """Return the names in a folder, sorted."""
        return sorted(os.listdir(path))

    def stat(self, path: Path) -> Stat | None:
        """Return kind and size of a file or folder; None if it does not exist."""
        try:
            status = os.stat(path)
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
                raise
            return None
        return Stat(S_ISDIR(status.st_mode), S_ISREG(status.st_mode), status.st_size)

    def is_link(self, path: Path) -> bool:
        return os.path.islink(path)


local = LocalFiles()
stores: dict[str, ObjectFiles] = {}  # by scheme, made on first use


def backend_of(path: Path) -> LocalFiles | ObjectFiles:
    """Return the object for the file system, or the object store, that holds `path`."""
    if not isinstance(path, ObjectPath):
        return local
    if path.scheme not in stores:
        stores[path.scheme] = ObjectFiles(path.scheme)
    return stores[path.scheme]


def is_object(path: Path) -> bool:
    """Return whether the path is in an object store: it has no renaming, no locks, and no folders without objects."""
    return isinstance(path, ObjectPath)


# ---------------------------------------------------------------- functions made of these calls


def exists(path: Path) -> bool:
    """Return whether the path is a file, a folder, or anything else; links are followed."""
    return backend_of(path).stat(path) is not None


def is_folder(path: Path) -> bool:
    """Return whether the path is a folder; links are followed."""
    status = backend_of(path).stat(path)
    return status is not None and status.is_folder


def is_file(path: Path) -> bool:
    """Return whether the path is a regular file; links are followed."""
    status = backend_of(path).stat(path)
    return status is not None and status.is_file


def write_all(file: BinaryIO, data: Any, path: Path) -> None:
    """Write all of `data`, bytes or a buffer of bytes, to the open file of `path`."""
    write = backend_of(path).write
    rest = memoryview(data)
    while len(rest):
        written = write(file, rest)
        rest = rest[written:]


def write_and_sync_content(path: Path, text: str) -> None:
    """Write a file and sync its content; `sync_folder` syncs its name."""
    with backend_of(path).open(path, "wb") as file:
        write_all(file, text.encode(), path)
        backend_of(path).sync(file)


def write_atomically(path: Path, text: str) -> None:
    """Write a file that appears, or replaces the previous one, only once all of it is on the disk."""
    if is_object(path):
        write_and_sync_content(path, text)
        return
    partial = path.with_name(path.name + ".partial")
    write_and_sync_content(partial, text)
    backend_of(path).rename(partial, path)
    backend_of(path).sync_folder(path.parent)


def check_writable(probe: Path) -> None:
    """Raise OSError unless a file can be written: `probe`, which is removed again."""
    write_and_sync_content(probe, "")
    remove_if_there(probe)


def read_start(path: Path, most: int) -> bytes:
    """Return the first `most` bytes of a file, or all if it has fewer."""
    with backend_of(path).open(path, "rb") as file:
        status = backend_of(path).stat(path)
        if status is None and is_object(path):  # opening an object makes no request, so it may not exist
            raise FileNotFoundError(errno.ENOENT, "no such object", str(path))
        size = status.size if status else 0
        buffer = bytearray(min(most, size))
        count = read_all(file, memoryview(buffer), path)
        return bytes(buffer[:count])


def open_at(path: Path, start: int) -> BinaryIO:
    """Open a file for reading from byte `start` on."""
    file = backend_of(path).open(path, "rb")
    try:
        file.seek(start)
    except BaseException:
        file.close()
        raise
    return file


@contextlib.contextmanager
def reading_ahead(spans: Sequence[FileSpan]) -> Iterator[Callable[[Path, int], BinaryIO]]:
    """Yield a function like `open_at` for `spans`, which must be read in this order.

    A span that is not read to its end must be the last one. Spans of an object store are fetched several at a time, in
    up to 72 MiB of memory.
    """
    if not spans or not is_object(spans[0].path):
        yield open_at
        return
    with ReadAhead(spans, lambda path: backend_of(path).open(path, "rb")) as read_ahead:

        def open_ahead(path: Path, start: int) -> BinaryIO:
            file = open_at(path, start)
            file.read_ahead = read_ahead
            return file

        yield open_ahead


def sizes_of(folder: Path, names: Iterable[str]) -> dict[str, int | None]:
    """Return the bytes of files in a folder; None for one that does not exist or whose size cannot be read."""
    if is_object(folder):
        sizes = backend_of(folder).sizes(folder)  # one request for all
        return {name: sizes.get(name) for name in names}
    return {name: size_of_file(folder / name) for name in names}


def size_of_file(path: Path) -> int | None:
    """Return the size in bytes; None if there is no readable file.

    Raises OSError if an object store does not answer.
    """
    try:
        status = backend_of(path).stat(path)
    except OSError:
        if is_object(path):
            raise
        return None
    if status is None or not status.is_file:
        return None
    return status.size


def read_all(file: BinaryIO, buffer: memoryview, path: Path) -> int:
    """Fill `buffer` from the open file of `path`; return the number of bytes read, fewer only if the file ends."""
    done = 0
    while done < len(buffer):
        count = backend_of(path).read_into(file, buffer[done:])
        if not count:
            break
        done += count
    return done


def make_folders(path: Path) -> None:
    """Make a folder and its parents, unless they exist."""
    if is_object(path) or is_folder(path):
        return
    if path.parent != path:
        make_folders(path.parent)
    try:
        backend_of(path).make_folder(path)
    except FileExistsError:
        if not is_folder(path):  # if it is a folder, another process has made it meanwhile
            raise


def remove_if_there(path: Path) -> None:
    """Remove a file or a link, if it exists."""
    with contextlib.suppress(FileNotFoundError):
        backend_of(path).remove(path)


def remove_tree(path: Path) -> None:
    """Remove a folder and everything in it. Links are removed, not followed."""
    if is_object(path):
        backend_of(path).remove_all(path / name for name in backend_of(path).names(path))
        return
    for name in backend_of(path).names(path):
        inner = path / name
        if is_folder(inner) and not backend_of(path).is_link(inner):
            remove_tree(inner)
        else:
            backend_of(path).remove(inner)
    backend_of(path).remove_folder(path)
