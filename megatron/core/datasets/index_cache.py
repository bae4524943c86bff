"""The cache of index arrays: built once, by one process; a file of other data or a half-written file is never read.

The file name is a hash of all that the arrays depend on, including the content of the data: moved data keep their cache, and
changed data or settings get a new one. A description with a hash of each file is written last, so an unfinished build and a
damaged file are both detected.

The builder reads every file whole and compares its hash before the run uses it. It does so for all processes: the files are
shared, and a thousand readers would ask the file system a thousand times for the same bytes.
"""

import errno
import hashlib
import json
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from megatron.core.datasets.mmap_indexed_dataset import IndexedDataset, mapping
from megatron.core.storage.atomic_file import atomic_file

_FORMAT = 3  # of the cache; raise it whenever the same fields give other arrays

# An index file up to this size goes into the cache key whole; of a larger one, blocks that add up to this size do.
_FINGERPRINT_BYTES = 1 << 26
_FINGERPRINT_BLOCK = 1 << 20

_HASH_BLOCK = 16 << 20  # bytes that one thread reads and hashes at a time
_HASH_THREADS = 8


def content_fingerprint(indexed: IndexedDataset) -> dict[str, Any]:
    """Identifies a token file: its sizes, and a hash of its index.

    The arrays depend on the lengths alone, so no token is read. An index above 64 MB (3 million documents) is hashed in 64
    blocks, spread evenly from its first byte to its last.
    """
    digest = hashlib.blake2b(digest_size=16)
    size = hash_spread(indexed.index_path, digest, _FINGERPRINT_BYTES // _FINGERPRINT_BLOCK, _FINGERPRINT_BLOCK)
    return {"idx": digest.hexdigest(), "idx_bytes": size, "bin_bytes": os.path.getsize(indexed.data_path)}


def hash_spread(path: str, digest: Any, blocks: int, block: int) -> int:
    """Feed a file to `digest`, and return its size: whole up to blocks * block bytes, else so many blocks spread evenly."""
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size <= blocks * block:
            digest.update(file.read())
            return size
        for i in range(blocks):
            file.seek((size - block) * i // (blocks - 1))
            digest.update(file.read(block))
    return size


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
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self.path("description.txt").unlink(missing_ok=True)
            for part, array in zip(self.parts, arrays, strict=True):
                with atomic_file(self.path(f"{part}.npy")) as file:
                    np.save(file, array, allow_pickle=False)
            with atomic_file(self.path("description.txt")) as file:
                file.write(json.dumps(self._description(), indent=4).encode())
        except OSError as error:
            raise ValueError(f"{self.folder}: {error.strerror}; set --data-cache-path to a writable folder") from error

    def is_complete(self, say: Callable[[str], None]) -> bool:
        """Whether every file is there as it was written, read and hashed whole; `say` hears of damaged ones.

        Up to 8 cores hash side by side, 1.5 GB/s each where they have instructions for SHA-256; a disk is slower.
        """
        described = self.path("description.txt")
        if not described.exists():
            return False
        try:
            whole = json.loads(described.read_bytes()) == self._description()
        except (OSError, ValueError, RecursionError):
            whole = False
        if not whole:
            say(f"index cache {self.path('*')} is damaged and is built again")
        return whole

    def load(self) -> tuple[np.ndarray, ...]:
        """The arrays, memory-mapped. Raises ValueError for files that cannot be read or are no arrays."""
        return tuple(_open_array(self.path(f"{part}.npy")) for part in self.parts)

    def _description(self) -> dict[str, Any]:
        """The description of the files as they are."""
        return {**self.fields, "sha256": {part: _hash_of_blocks(self.path(f"{part}.npy")) for part in self.parts}}


def _open_array(path: Path) -> np.ndarray:
    with mapping(path):
        try:
            return np.lib.format.open_memmap(path, mode="r")  # not np.load, which opens archives and pickles too
        except OSError as error:
            if error.errno == errno.ENOMEM:
                raise
            raise ValueError(
                f"{path} cannot be read ({error.strerror}): the process that builds the index cache failed (see its "
                "message), or its folder is not shared by all hosts; set --data-cache-path to a folder that they share"
            ) from None
        except Exception as error:  # of many types: numpy reads the header as if it were a line of Python
            raise ValueError(f"{path} is damaged ({error}); delete it") from None


def _hash_of_blocks(path: Path) -> str:
    """The SHA-256 of the SHA-256 of each 16 MB of a file, in hexadecimal: blocks are hashed side by side.

    Read, not mapped: a sector that the disk cannot read is an OSError then, where a map would end the process.
    """
    with open(path, "rb") as file:

        def digest(at: int) -> bytes:
            return hashlib.sha256(os.pread(file.fileno(), _HASH_BLOCK, at)).digest()

        blocks = range(0, os.fstat(file.fileno()).st_size, _HASH_BLOCK)
        with ThreadPoolExecutor(min(_HASH_THREADS, os.cpu_count() or 1)) as pool:
            return hashlib.sha256(b"".join(pool.map(digest, blocks))).hexdigest()
