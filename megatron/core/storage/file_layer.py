"""The file layer: every file call of a save and of a load goes through an object with these methods. No torch.

    at(path)                       the file system, or the object store, that holds `path`
    write_synced, read_start, remove_tree, make_folders, ...        what is made of its calls

A test puts a double in the place of `local`, which fails, stops or cuts short any call; nothing of a checkpoint goes
beside it.
To add a file system: a class with the methods of `LocalFiles`. `ObjectFiles` is one for all object stores of fsspec.
"""

import contextlib
import errno
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from stat import S_ISDIR, S_ISREG
from typing import Any, BinaryIO

from megatron.core.storage.object_store import ObjectFiles
from megatron.core.storage.paths import ObjectPath, Stat
from megatron.core.storage.read_ahead import FileSpan, ReadAhead


class LocalFiles:
    """The file systems that this machine has mounted, one method for each system call. All raise OSError."""

    def open(self, path: Path, mode: str) -> BinaryIO:
        """mode: "rb", "wb", or "xb", which raises FileExistsError where something is. Unbuffered."""
        return open(path, mode, buffering=0)

    def write(self, file: BinaryIO, data: Any) -> int:
        """Writes some of `data`, bytes or a buffer; the bytes written."""
        return file.write(data)

    def read_into(self, file: BinaryIO, buffer: memoryview) -> int:
        """Reads into the start of `buffer`; the bytes read, 0 at the end of the file."""
        return file.readinto(buffer)  # type: ignore[attr-defined]

    def sync(self, file: BinaryIO) -> None:
        """Waits until the content is on the disk; `sync_folder` does so for its name."""
        os.fsync(file.fileno())

    def sync_folder(self, path: Path) -> None:
        """Waits until the names in a folder are on the disk; a rename is durable only then."""
        handle = os.open(path, os.O_RDONLY)
        try:
            with contextlib.suppress(OSError):  # some network file systems cannot; their server orders renames
                os.fsync(handle)
        finally:
            os.close(handle)

    def rename(self, source: Path, target: Path) -> None:
        """A file replaces a file; a folder needs a free name."""
        os.replace(source, target)

    def remove(self, path: Path) -> None:
        os.unlink(path)

    def remove_folder(self, path: Path) -> None:
        """An empty one."""
        os.rmdir(path)

    def make_folder(self, path: Path) -> None:
        os.mkdir(path)

    def names(self, path: Path) -> list[str]:
        """What a folder holds, sorted."""
        return sorted(os.listdir(path))

    def stat(self, path: Path) -> Stat | None:
        """None if nothing is there."""
        try:
            found = os.stat(path)
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
                raise
            return None
        return Stat(S_ISDIR(found.st_mode), S_ISREG(found.st_mode), found.st_size)

    def is_link(self, path: Path) -> bool:
        return os.path.islink(path)


local = LocalFiles()
stores: dict[str, ObjectFiles] = {}  # by scheme, once they are asked


def at(path: Path) -> LocalFiles | ObjectFiles:
    """The file system, or the object store, that holds `path`."""
    if not isinstance(path, ObjectPath):
        return local
    if path.scheme not in stores:
        stores[path.scheme] = ObjectFiles(path.scheme)
    return stores[path.scheme]


def is_object(path: Path) -> bool:
    """Whether it lies in an object store: no renaming, no locks, no folders without objects."""
    return isinstance(path, ObjectPath)


# ---------------------------------------------------------------- made of these calls


def exists(path: Path) -> bool:
    return at(path).stat(path) is not None


def is_folder(path: Path) -> bool:
    found = at(path).stat(path)
    return found is not None and found.is_folder


def is_file(path: Path) -> bool:
    found = at(path).stat(path)
    return found is not None and found.is_file


def write_all(file: BinaryIO, data: Any, path: Path) -> None:
    """Writes all of `data`, bytes or a buffer of bytes, to the open file of `path`."""
    rest, write = memoryview(data), at(path).write
    while len(rest):
        rest = rest[write(file, rest) :]


def write_synced(path: Path, text: str) -> None:
    """Writes a file and syncs its content; `sync_folder` syncs its name."""
    with at(path).open(path, "wb") as file:
        write_all(file, text.encode(), path)
        at(path).sync(file)


def write_whole(path: Path, text: str) -> None:
    """Writes a file that has its name, or replaces the one that has, only once all of it is on the disk."""
    if is_object(path):
        write_synced(path, text)
        return
    partial = path.with_name(path.name + ".partial")
    write_synced(partial, text)
    at(path).rename(partial, path)
    at(path).sync_folder(path.parent)


def check_writable(probe: Path) -> None:
    """Raises OSError unless a file can be written: `probe`, which is removed again."""
    write_synced(probe, "")
    remove_if_there(probe)


def read_start(path: Path, most: int) -> bytes:
    """The first `most` bytes of a file, or all if it has fewer."""
    with at(path).open(path, "rb") as file:
        found = at(path).stat(path)
        if found is None and is_object(path):  # which is opened without being asked for
            raise FileNotFoundError(errno.ENOENT, "no such object", str(path))
        room = bytearray(min(most, found.size if found else 0))
        return bytes(room[: read_all(file, memoryview(room), path)])


def open_at(path: Path, start: int) -> BinaryIO:
    """A file that is read from byte `start` on."""
    file = at(path).open(path, "rb")
    try:
        file.seek(start)
    except BaseException:
        file.close()
        raise
    return file


@contextlib.contextmanager
def reading_ahead(spans: Sequence[FileSpan]) -> Iterator[Callable[[Path, int], BinaryIO]]:
    """`open_at`, for `spans` that are read in this order, each to its end or none after it. Those of an object store are
    fetched
    several at a time, in up to 72 MiB of memory."""
    if not spans or not is_object(spans[0].path):
        yield open_at
        return
    with ReadAhead(spans, lambda path: at(path).open(path, "rb")) as ahead:

        def open_ahead(path: Path, start: int) -> BinaryIO:
            file = open_at(path, start)
            file.ahead = ahead
            return file

        yield open_ahead


def sizes_of(folder: Path, names: Iterable[str]) -> dict[str, int | None]:
    """The bytes of files in a folder; None for one that is not there, or cannot be asked for."""
    if is_object(folder):
        found = at(folder).sizes(folder)
        return {name: found.get(name) for name in names}
    return {name: size_of_file(folder / name) for name in names}


def size_of_file(path: Path) -> int | None:
    """The size in bytes; None if there is no readable file. Raises OSError if an object store does not answer."""
    try:
        found = at(path).stat(path)
    except OSError:
        if is_object(path):
            raise
        return None
    return found.size if found is not None and found.is_file else None


def read_all(file: BinaryIO, buffer: memoryview, path: Path) -> int:
    """Fills `buffer` from the open file of `path`; the bytes read, fewer only where the file ends."""
    done = 0
    while done < len(buffer) and (count := at(path).read_into(file, buffer[done:])):
        done += count
    return done


def make_folders(path: Path) -> None:
    """Makes a folder and those above it, where they are not there."""
    if is_object(path) or is_folder(path):
        return
    if path.parent != path:
        make_folders(path.parent)
    try:
        at(path).make_folder(path)
    except FileExistsError:
        if not is_folder(path):  # another process may have made it meanwhile
            raise


def remove_if_there(path: Path) -> None:
    with contextlib.suppress(FileNotFoundError):
        at(path).remove(path)


def remove_tree(path: Path) -> None:
    """Removes a folder and all in it. Links are removed, not followed."""
    if is_object(path):
        at(path).remove_all(path / name for name in at(path).names(path))
        return
    for name in at(path).names(path):
        inner = path / name
        if is_folder(inner) and not at(path).is_link(inner):
            remove_tree(inner)
        else:
            at(path).remove(inner)
    at(path).remove_folder(path)
