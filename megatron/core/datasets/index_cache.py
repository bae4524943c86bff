"""The cache of index arrays is built once, by one process. Files of other data and half-written files are never read.

A file's name is a hash of all that the arrays depend on, including the content of the data: moved data keep their
cache, and changed data or settings get a new one. A description with a hash of each file is written last, so that an
unfinished build and a damaged file are both detected.

The builder reads every file in full and compares its hash before the run uses it. It does so for all processes: the
files are shared, and a thousand readers would ask the file system a thousand times for the same bytes.
"""

import errno
import glob
import hashlib
import json
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megatron.core.datasets.mmap_indexed_dataset import IndexedDataset, mapping
from megatron.core.storage.atomic_file import atomic_file

_FORMAT = 3  # of the cache; raise it whenever the same fields give other arrays

# An index file up to this size is hashed in full for the cache key; of a larger one, blocks that add up to this size are.
_FINGERPRINT_BYTES = 1 << 26
_FINGERPRINT_BLOCK = 1 << 20

_HASH_BLOCK = 16 << 20  # bytes that one thread reads and hashes at a time
_HASH_THREADS = 8


def content_fingerprint(indexed: IndexedDataset) -> dict[str, Any]:
    """Identify a token file by its sizes and a hash of its index. The keys are part of the name of a cache.

    The arrays depend on the lengths alone, so no token is read. An index above 64 MB (3 million documents) is hashed in
    64 blocks, spread evenly from its first byte to its last.
    """
    digest = hashlib.blake2b(digest_size=16)
    size = hash_spread(indexed.index_path, digest, _FINGERPRINT_BYTES // _FINGERPRINT_BLOCK, _FINGERPRINT_BLOCK)
    return {"idx": digest.hexdigest(), "idx_bytes": size, "bin_bytes": os.path.getsize(indexed.data_path)}


def hash_spread(path: str, digest: Any, num_blocks: int, block_bytes: int) -> int:
    """Feed a file to `digest`, and return its size in bytes.

    A file up to num_blocks * block_bytes is fed in full; of a longer one so many blocks, spread evenly from its first
    byte to its last.
    """
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size <= num_blocks * block_bytes:
            digest.update(file.read())
            return size
        for i in range(num_blocks):
            file.seek((size - block_bytes) * i // (num_blocks - 1))
            digest.update(file.read(block_bytes))
    return size


_DESCRIPTION = "-description.txt"  # ends the name of a description


class IndexCache:
    """The files of one set of arrays: FOLDER/{hash}-{kind}-{split}-{array name}.npy, and -description.txt.

    fields: all that the arrays depend on, as JSON values. Names and values are hashed: a renamed field is another
    cache.
    """

    def __init__(self, folder: Path, kind: str, split: str, fields: dict[str, Any], array_names: tuple[str, ...]):
        self.folder = folder
        self.array_names = array_names
        self.fields = json.loads(json.dumps({"format": _FORMAT, "class": kind, "split": split, **fields}))
        key = hashlib.blake2b(json.dumps(self.fields).encode(), digest_size=16).hexdigest()
        self.stem = f"{key}-{kind}-{split}"

    def path(self, ending: str) -> Path:
        return self.folder / f"{self.stem}-{ending}"

    def write(self, arrays: tuple[np.ndarray, ...]) -> None:
        """Write one file for each array, then the description. Arrays may have any shape and dtype.

        Raises ValueError if that fails.
        """
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self.path("description.txt").unlink(missing_ok=True)  # until it is written again, nothing is complete
            for name, array in zip(self.array_names, arrays, strict=True):
                with atomic_file(self.path(f"{name}.npy")) as file:
                    np.save(file, array, allow_pickle=False)
            with atomic_file(self.path("description.txt")) as file:
                file.write(json.dumps(self._description(), indent=4).encode())
        except OSError as error:
            raise ValueError(f"{self.folder}: {error.strerror}; set --data-cache-path to a writable folder") from error

    def is_complete(self, say: Callable[[str], None]) -> bool:
        """Return whether every file is there as it was written: each is read and hashed in full. `say` takes a warning.

        Up to 8 cores hash side by side, 1.5 GB/s each where they have instructions for SHA-256; a disk is slower.
        """
        description = self.path("description.txt")
        if not description.exists():
            return False
        try:
            is_intact = json.loads(description.read_bytes()) == self._description()
        except (OSError, ValueError, RecursionError):
            is_intact = False
        if not is_intact:
            say(f"index cache {self.path('*')} is damaged and is built again")
        return is_intact

    def load(self) -> tuple[np.ndarray, ...]:
        """Memory-map the arrays, each in the shape and dtype in which it was written.

        Raises ValueError for files that cannot be read or are no arrays.
        """
        return tuple(_open_array(self.path(f"{name}.npy")) for name in self.array_names)

    def _description(self) -> dict[str, Any]:
        """Describe the files as they are now."""
        hashes = {name: _hash_of_blocks(self.path(f"{name}.npy")) for name in self.array_names}
        return {**self.fields, "sha256": hashes}


@dataclass(frozen=True)
class CachedArrays:
    """One set of arrays in a cache folder, as its description says. files: its description first, then its arrays."""

    folder: Path
    stem: str  # of its files' names
    fields: dict[str, Any]  # all that the arrays depend on
    files: list[Path]

    @property
    def key(self) -> str:
        """The hash that its names begin with."""
        return self.stem.split("-")[0]

    @property
    def nbytes(self) -> int:
        return sum(path.stat().st_size for path in self.files)

    @property
    def written(self) -> float:
        """The time at which it was complete, in seconds since 1970."""
        return self.files[0].stat().st_mtime

    def remove(self) -> None:
        """Remove the files, the description first: nothing takes the rest for complete. Raises OSError."""
        for path in self.files:
            path.unlink(missing_ok=True)


def cached_arrays_in(folder: Path) -> list[CachedArrays]:
    """Return the complete sets of arrays in a cache folder, the oldest first.

    Files without a description of this cache's form are left out: those of Megatron-LM, and of a build that goes on.
    """
    found = []
    for path in folder.glob(f"*{_DESCRIPTION}"):
        try:
            fields = json.loads(path.read_bytes())
        except (OSError, ValueError, RecursionError):
            continue
        if not isinstance(fields, dict) or not {"format", "class", "split", "sha256"} <= fields.keys():
            continue
        stem = path.name.removesuffix(_DESCRIPTION)
        arrays = sorted(folder.glob(f"{glob.escape(stem)}-*.npy"))
        found.append(CachedArrays(folder, stem, fields, [path, *arrays]))
    return sorted(found, key=lambda one: one.written)


def _open_array(path: Path) -> np.ndarray:
    with mapping(path):
        try:
            return np.lib.format.open_memmap(path, mode="r")  # not np.load, which opens archives and pickles too
        except OSError as error:
            if error.errno == errno.ENOMEM:
                raise
            raise ValueError(
                f"{path} cannot be read ({error.strerror}): either the process that builds the index cache failed "
                "(see its message), or its folder is not shared by all hosts; set --data-cache-path to a shared "
                "folder"
            ) from None
        except Exception as error:  # can have many types: numpy reads the header as if it were a line of Python
            raise ValueError(f"{path} is damaged ({error}); delete it") from None


def _hash_of_blocks(path: Path) -> str:
    """Return the SHA-256 of the SHA-256 of each 16 MB of a file, in hexadecimal: so blocks can be hashed side by side.

    The file is read, not mapped: a sector that the disk cannot read is an OSError then, where a map would end the
    process.
    """
    with open(path, "rb") as file:

        def digest(offset: int) -> bytes:
            return hashlib.sha256(os.pread(file.fileno(), _HASH_BLOCK, offset)).digest()

        offsets = range(0, os.fstat(file.fileno()).st_size, _HASH_BLOCK)
        with ThreadPoolExecutor(min(_HASH_THREADS, os.cpu_count() or 1)) as pool:
            return hashlib.sha256(b"".join(pool.map(digest, offsets))).hexdigest()
