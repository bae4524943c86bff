"""Token files: PREFIX.bin holds the tokens of all sequences end to end, PREFIX.idx says where each sequence begins.

PREFIX.idx, little-endian, N sequences, D = documents + 1:

    offset  bytes
    0       9      MMIDIDX and two NUL
    9       8      uint64 version, 1
    17      1      uint8 dtype code (`DTYPES`)
    18      8      uint64 N
    26      8      uint64 D
    34      4 N    int32 tokens of each sequence
            8 N    int64 byte at which each sequence begins in PREFIX.bin
            8 D    int64 sequences before each document, and N at the end; an empty document repeats its number
            N      int8 mode of each sequence (its modality), in multimodal files only; the header is the same

Plain text has one sequence a document; text split into sentences has many.
"""

import contextlib
import errno
import glob
import operator
import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from megatron.core.base.lfs_pointer import FETCH_LFS, LFS_POINTER, is_lfs_pointer

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")
DTYPES = {1: np.uint8, 2: np.int8, 3: np.int16, 4: np.int32, 5: np.int64, 6: np.float64, 7: np.float32, 8: np.uint16}

CHUNK_SEQUENCES = 1 << 16  # checked or copied at a time, in constant memory: half a MB an array


def token_dtype(vocab_size: int) -> type:
    """Return the dtype of the token files of a vocabulary, by Megatron's convention (`DType.optimal_dtype`)."""
    return np.uint16 if vocab_size < 65500 else np.int32


class IndexedDataset:
    """The sequences of one PREFIX, memory-mapped and read-only. Opening reads PREFIX.idx once, and no token.

    `dataset[i]` is sequence i, `dataset[a:b]` a list of neighbours, `dataset.get(i, offset, length)` a part of one.
    Arrays are views of the map. Raises FileNotFoundError for missing files and ValueError for damaged ones.

    sequence_lengths: [N], tokens of each. document_indices: [D], sequences before each document, and of all.
    multimodal: the file has the mode of each sequence, here `sequence_modes` (None otherwise). mmap: False reads tokens
    with ordinary reads, for file systems that map badly; arrays are copies then.
    """

    def __init__(self, prefix: str | Path, *, multimodal: bool = False, mmap: bool = True):
        self.prefix = str(prefix)
        if problem := missing_file_problem(self.prefix):
            raise FileNotFoundError(problem)
        index = _read_index(self.index_path, multimodal)
        self.dtype = index.dtype
        self.sequence_lengths = index.lengths
        self.document_indices = index.documents
        self._starts = index.starts  # [N], in bytes
        self.sequence_modes = index.modes if multimodal else None
        _check_sequences(self.index_path, index)
        _check_documents(self.index_path, index.documents, len(self))
        self._check_data_size()
        self._tokens = _map(self.data_path, self.dtype) if mmap else None

    @property
    def index_path(self) -> str:
        return f"{self.prefix}.idx"

    @property
    def data_path(self) -> str:
        return f"{self.prefix}.bin"

    @property
    def document_count(self) -> int:
        return len(self.document_indices) - 1

    def __len__(self) -> int:
        """Return the number of sequences in the file."""
        return len(self.sequence_lengths)

    def __getitem__(self, key: int | slice) -> np.ndarray | list[np.ndarray]:
        """Return the tokens of sequence `key`, [length], or of each sequence of a slice, in the file's dtype.

        Raises IndexError for a number outside the file, ValueError for a slice whose step is not 1.
        """
        if not isinstance(key, slice):
            return self.get(key)
        numbers = range(*key.indices(len(self)))
        if numbers.step != 1:
            raise ValueError(
                f"{self.data_path}: a slice must have step 1, not {numbers.step}, because it is read in one piece"
            )
        return [self.get(i) for i in numbers]

    def get(self, i: int, offset: int = 0, length: int | None = None) -> np.ndarray:
        """Return tokens [offset, offset + length) of sequence i, in the file's dtype: [length].

        length None reads to the end of the sequence. Raises IndexError for tokens outside it.
        """
        number = operator.index(i)
        if not -len(self) <= number < len(self):
            raise IndexError(f"there is no sequence {number} in {self.index_path}, which has {len(self)}")
        tokens = int(self.sequence_lengths[number])
        if length is None:
            length = tokens - offset
        if offset < 0 or length < 0 or offset + length > tokens:
            raise IndexError(
                f"tokens {offset} to {offset + length} of sequence {number} of {self.index_path} do not exist: it "
                f"has {tokens} tokens"
            )
        first = int(self._starts[number]) // self.dtype.itemsize + offset
        return self.tokens(first, first + length)

    def tokens(self, first: int, past: int) -> np.ndarray:
        """Return tokens [first, past) of the file, counted over all sequences: [past - first], in the file's dtype."""
        if self._tokens is not None:
            return self._tokens[first:past]
        return np.fromfile(self.data_path, self.dtype, past - first, offset=first * self.dtype.itemsize)

    def _check_data_size(self) -> None:
        expected = int(self.sequence_lengths.sum(dtype=np.int64)) * self.dtype.itemsize
        actual = os.path.getsize(self.data_path)
        if actual != expected:
            raise ValueError(
                f"{self.data_path} has {actual} bytes, but {self.index_path} describes {expected}: the two files "
                "belong to different data sets, or a copy is incomplete; copy both again or preprocess again"
            )


def missing_file_problem(prefix: str) -> str | None:
    """Say which file of `prefix` does not exist, and which prefix may be meant; None if both exist.

    Meant may be: the prefix with the name that preprocessing appends, or the prefix without a file's ending.
    """
    missing = [path for path in (f"{prefix}.idx", f"{prefix}.bin") if not os.path.isfile(path)]
    if not missing:
        return None
    without_ending = prefix.removesuffix(".bin").removesuffix(".idx")
    if without_ending != prefix and os.path.isfile(f"{without_ending}.idx"):
        similar = [without_ending]
    else:
        folder, name = os.path.split(prefix)
        paths = glob.glob(os.path.join(glob.escape(folder), glob.escape(name) + "_*.idx"))
        similar = sorted(path.removesuffix(".idx") for path in paths)[:3]
    hint = f"; did you mean {' or '.join(similar)}?" if similar else ""
    return f"{missing[0]} does not exist; give the prefix of PREFIX.bin and PREFIX.idx, without the ending{hint}"


def _map(path: str, dtype: np.dtype) -> np.ndarray:
    """Map a file as a read-only array: [its size / the size of `dtype`]."""
    if os.path.getsize(path) == 0:  # an empty file cannot be mapped
        return np.empty(0, dtype)
    with mapping(path):
        return np.asarray(np.memmap(path, dtype=dtype, mode="r"))


@contextlib.contextmanager
def mapping(path: str | Path) -> Iterator[None]:
    """Turn a failed memory map into a ValueError; a blend of ten thousand data sets takes about ten maps for each."""
    try:
        yield
    except OSError as error:
        if error.errno != errno.ENOMEM:
            raise
        raise ValueError(
            f"{path} cannot be mapped into memory: this process has reached the system's limit of memory maps or of "
            "address space; merge data sets (tools/merge_datasets.py), or raise the limit (sysctl vm.max_map_count, "
            "ulimit -v)"
        ) from None


class _Index(NamedTuple):
    dtype: np.dtype
    lengths: np.ndarray  # [N]
    starts: np.ndarray  # [N], in bytes
    documents: np.ndarray  # [D]
    modes: np.ndarray  # [N], or [0] where there are none


def _read_index(path: str, multimodal: bool) -> _Index:
    """Read PREFIX.idx and check its header and its size. Raises ValueError."""
    content = _map(path, np.dtype(np.uint8))
    if is_lfs_pointer(content[:100].tobytes()):
        raise ValueError(f"{path} {LFS_POINTER}; {FETCH_LFS}")
    if len(content) < HEADER.size or content[: len(MAGIC)].tobytes() != MAGIC:
        raise ValueError(f"{path} is not an index of a token file: its first bytes are wrong; preprocess again")
    _, version, code, sequences, documents = HEADER.unpack(content[: HEADER.size].tobytes())
    if version != VERSION:
        raise ValueError(f"{path} has version {version}, but only version {VERSION} can be read; preprocess again")
    if code not in DTYPES:
        raise ValueError(f"{path} has the unknown dtype code {code} (known are 1 to {len(DTYPES)}); preprocess again")

    # the size tells whether there are modes
    without_modes = HEADER.size + 12 * sequences + 8 * documents
    with_modes = without_modes + sequences
    expected = with_modes if multimodal else without_modes
    unexpected = without_modes if multimodal else with_modes
    if sequences and len(content) == unexpected:
        carries = "no mode for each sequence, so it is" if multimodal else "a mode for each sequence, so it seems to be"
        raise ValueError(
            f"{path} has {carries} {'not ' * multimodal}multimodal; open it with multimodal={not multimodal}"
        )
    if len(content) != expected:
        raise ValueError(
            f"{path} has {len(content)} bytes, but its header describes {expected}: a copy is incomplete, or the "
            "file is damaged; copy it again or preprocess again"
        )

    # the arrays follow the header without gaps
    ends = [4 * sequences, 12 * sequences, without_modes - HEADER.size]
    lengths, starts, document_indices, modes = np.split(content[HEADER.size :], ends)
    return _Index(
        dtype=np.dtype(DTYPES[code]),
        lengths=lengths.view("<i4"),
        starts=starts.view("<i8"),
        documents=document_indices.view("<i8"),
        modes=modes.view("i1"),
    )


def _check_sequences(path: str, index: _Index) -> None:
    """Raise ValueError unless no length is negative and every sequence begins where the one before it ends."""
    lengths = index.lengths
    starts = index.starts
    itemsize = index.dtype.itemsize
    start = 0  # byte at which the chunk must begin
    for first in range(0, len(lengths), CHUNK_SEQUENCES):
        chunk = lengths[first : first + CHUNK_SEQUENCES].astype(np.int64)
        if chunk.min() < 0:
            i = first + int(np.argmax(chunk < 0))
            raise ValueError(f"{path}: sequence {i} has the negative length {lengths[i]}; preprocess again")
        ends = start + np.cumsum(chunk) * itemsize
        is_wrong = starts[first : first + CHUNK_SEQUENCES] != ends - chunk * itemsize
        if is_wrong.any():
            i = first + int(np.argmax(is_wrong))
            raise ValueError(
                f"{path}: sequence {i} starts at byte {starts[i]}, but must start where sequence {i - 1} ends; "
                "preprocess again"
            )
        start = int(ends[-1])


def _check_documents(path: str, documents: np.ndarray, sequences: int) -> None:
    """Raise ValueError unless the document array starts with 0, never falls, and ends with the number of sequences."""
    covers_all = len(documents) > 0 and documents[0] == 0 and documents[-1] == sequences
    if not covers_all or (documents[1:] < documents[:-1]).any():
        raise ValueError(
            f"{path}: the document indices must rise from 0 to the number of sequences, {sequences}; preprocess again"
        )
