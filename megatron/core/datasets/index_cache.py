"""Index arrays kept in files: built once, by one process, never mixed up, never half written.

The name of the files is a hash of everything that the arrays depend on, the content of the data among it: moved data keep
their cache, and changed data or settings get a new one. A description with a checksum of each file comes last, so that an
interrupted build is seen as unfinished and a damaged file as damaged.
"""

import contextlib
import errno
import hashlib
import json
import os
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from megatron.core.datasets.indexed import IndexedDataset, atomic_file, unmapped

_FORMAT = 2  # of the cache; raise it whenever the same fields give other arrays

# An index file up to this size goes into the cache key whole; of a larger one, blocks that add up to this size do.
_FINGERPRINT_BYTES = 1 << 26
_FINGERPRINT_BLOCK = 1 << 20


class DataFiles:
    """The token files of a run, each opened once, and what tells each from others."""

    def __init__(self, mmap: bool, look_at: Callable[[IndexedDataset], None] = lambda indexed: None):
        """look_at is called with each file when it is opened."""
        self._mmap, self._look_at = mmap, look_at
        self._opened: dict[str, tuple[IndexedDataset, dict[str, Any]]] = {}

    def open(self, prefix: str) -> tuple[IndexedDataset, dict[str, Any]]:
        """(the file, its `content_fingerprint`)"""
        if prefix not in self._opened:
            indexed = IndexedDataset(prefix, mmap=self._mmap)
            self._look_at(indexed)
            self._opened[prefix] = (indexed, content_fingerprint(indexed))
        return self._opened[prefix]


def content_fingerprint(indexed: IndexedDataset) -> dict[str, Any]:
    """What tells one token file from another: its size, and a hash of the index.

    The arrays follow from the lengths alone, so the tokens are not read. Of an index past 64 MB (3 million documents)
    the hash takes 64 blocks spread evenly from its first byte to its last.
    """
    size = os.path.getsize(indexed.index_path)
    blocks = _FINGERPRINT_BYTES // _FINGERPRINT_BLOCK
    digest = hashlib.blake2b(digest_size=16)
    with open(indexed.index_path, "rb") as file:
        if size <= _FINGERPRINT_BYTES:
            digest.update(file.read())
        else:
            for i in range(blocks):
                file.seek((size - _FINGERPRINT_BLOCK) * i // (blocks - 1))
                digest.update(file.read(_FINGERPRINT_BLOCK))
    return {"idx": digest.hexdigest(), "idx_bytes": size, "bin_bytes": os.path.getsize(indexed.data_path)}


class IndexCache:
    """The files of one set of arrays: FOLDER/{hash}-{kind}-{split}-{part}.npy, and -description.txt.

    fields: what the arrays depend on, JSON values; parts: the names of the arrays.
    """

    def __init__(self, folder: Path, kind: str, split: str, fields: dict[str, Any], parts: tuple[str, ...]):
        self.folder, self.parts = folder, parts
        self.fields = json.loads(json.dumps({"format": _FORMAT, "class": kind, "split": split, **fields}))
        key = hashlib.blake2b(json.dumps(self.fields).encode(), digest_size=16).hexdigest()
        self.stem = f"{key}-{kind}-{split}"

    def path(self, part: str) -> Path:
        return self.folder / f"{self.stem}-{part}"

    def write(self, arrays: tuple[np.ndarray, ...]) -> None:
        """Write the arrays, one for each part. Raises ValueError if that fails."""
        with self._named_when_unwritable():
            self.folder.mkdir(parents=True, exist_ok=True)
            self.path("description.txt").unlink(missing_ok=True)
            for part, array in zip(self.parts, arrays, strict=True):
                with atomic_file(self.path(f"{part}.npy")) as file:
                    np.save(file, array, allow_pickle=False)
            self._describe({part: _checksum(self.path(f"{part}.npy")) for part in self.parts})

    def is_complete(self, say: Callable[[str], None]) -> bool:
        """Whether every file is there as it was written; `say` hears of damaged ones.

        A file of the size and date that the description knows is taken as it is; another one, a copy for instance, is read
        once, at about 1 GB/s.
        """
        described = self.path("description.txt")
        if not described.exists():
            return False
        try:
            whole = self._is_as_described(json.loads(described.read_bytes()))
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            whole = False
        if not whole:
            say(f"index cache {self.path('*')} is damaged and is built again")
        return whole

    def load(self) -> tuple[np.ndarray, ...]:
        """The arrays, memory-mapped. Raises ValueError for files that cannot be read or are no arrays."""
        arrays = []
        for part in self.parts:
            path = self.path(f"{part}.npy")
            try:
                arrays.append(open_array(path))
            except OSError as error:
                if error.errno == errno.ENOMEM:
                    raise unmapped(path) from None
                raise ValueError(
                    f"{path} cannot be read ({error.strerror}): the process that builds the index cache failed (see "
                    "its message), or its folder is not shared by all hosts; set --data-cache-path to a folder that "
                    "they share"
                ) from None
            except ValueError as error:
                raise ValueError(f"{path} is damaged ({error}); delete it") from None
        return tuple(arrays)

    def _is_as_described(self, description: dict[str, Any]) -> bool:
        checksums = description.pop("crc32")
        dates = description.pop("bytes and date")
        if description != self.fields or set(checksums) != set(self.parts):
            return False
        if dates == self._dates():
            return True
        if any(_checksum(self.path(f"{part}.npy")) != checksums[part] for part in self.parts):
            return False
        with contextlib.suppress(OSError):  # a cache that cannot be written is read anew each time
            self._describe(checksums)
        return True

    def _describe(self, checksums: dict[str, int]) -> None:
        description = {**self.fields, "crc32": checksums, "bytes and date": self._dates()}
        with atomic_file(self.path("description.txt")) as file:
            file.write(json.dumps(description, indent=4).encode())

    def _dates(self) -> dict[str, list[int]]:
        stats = {part: os.stat(self.path(f"{part}.npy")) for part in self.parts}
        return {part: [stat.st_size, stat.st_mtime_ns] for part, stat in stats.items()}

    @contextlib.contextmanager
    def _named_when_unwritable(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise ValueError(
                f"cannot write the index cache in {self.folder}: {error.strerror}; set --data-cache-path to a folder "
                "that can be written"
            ) from error


def open_array(path: Path | str) -> np.ndarray:
    """The array of a .npy file, memory-mapped. Raises ValueError for a file that is not one, OSError as `open` does."""
    try:
        return np.lib.format.open_memmap(path, mode="r")  # not np.load, which opens archives and pickles too
    except OSError:
        raise
    except Exception as error:  # of many types: numpy reads the header as if it were a line of Python
        raise ValueError(str(error)) from None


def _checksum(path: Path) -> int:
    checksum = 0
    with open(path, "rb") as file:
        while some := file.read(1 << 24):
            checksum = zlib.crc32(some, checksum)
    return checksum
