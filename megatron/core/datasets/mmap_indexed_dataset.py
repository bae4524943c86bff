"""Token files: PREFIX.bin holds the tokens of all sequences end to end, PREFIX.idx says where each begins.

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
            N      int8 mode of each sequence (its modality), in multimodal files only: nothing in the file says so

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

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")
DTYPES = {1: np.uint8, 2: np.int8, 3: np.int16, 4: np.int32, 5: np.int64, 6: np.float64, 7: np.float32, 8: np.uint16}

AT_ONCE = 1 << 16  # sequences handled at a time, so that memory stays constant: half a MB an array


def token_dtype(vocab_size: int) -> type:
    """The dtype that files of this vocabulary have by convention."""
    return np.uint16 if vocab_size < 65500 else np.int32


class IndexedDataset:
    """The sequences of one PREFIX, memory-mapped and read-only; to open it is to read PREFIX.idx once, and no token.

    `dataset[i]` is sequence i, `dataset[a:b]` a list of neighbours, `dataset.get(i, offset, length)` a part of one.
    Arrays are views of the map. Raises FileNotFoundError for missing files and ValueError for damaged ones.

    multimodal: the file says the mode of each sequence, here `sequence_modes` (None otherwise). mmap: False reads tokens
    with ordinary reads, for file systems that map badly; arrays are copies then.
    """

    def __init__(self, prefix: str | Path, *, multimodal: bool = False, mmap: bool = True):
        self.prefix = str(prefix)
        if problem := missing_file(self.prefix):
            raise FileNotFoundError(problem)
        index = _read_index(self.index_path, multimodal)
        self.dtype, self._starts = index.dtype, index.starts
        self.sequence_lengths, self.document_indices = index.lengths, index.documents
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
        """Sequences in the file."""
        return len(self.sequence_lengths)

    def __getitem__(self, key: int | slice) -> np.ndarray | list[np.ndarray]:
        if not isinstance(key, slice):
            return self.get(key)
        numbers = range(*key.indices(len(self)))
        if numbers.step != 1:
            raise ValueError(f"{self.data_path} is read in one piece: a slice must have step 1, not {numbers.step}")
        return [self.get(i) for i in numbers]

    def get(self, i: int, offset: int = 0, length: int | None = None) -> np.ndarray:
        """Tokens [offset, offset + length) of sequence i; length None reads to its end."""
        number = operator.index(i)
        if not -len(self) <= number < len(self):
            raise IndexError(f"sequence {number} of {self.index_path}, which has {len(self)}")
        tokens = int(self.sequence_lengths[number])
        length = tokens - offset if length is None else length
        if offset < 0 or length < 0 or offset + length > tokens:
            raise IndexError(
                f"tokens {offset} to {offset + length} of sequence {number} of {self.index_path}: it has {tokens}"
            )
        first = int(self._starts[number]) // self.dtype.itemsize + offset
        return self.tokens(first, first + length)

    def tokens(self, first: int, past: int) -> np.ndarray:
        """Tokens [first, past) of the whole file, counted over all sequences."""
        if self._tokens is not None:
            return self._tokens[first:past]
        return np.fromfile(self.data_path, self.dtype, past - first, offset=first * self.dtype.itemsize)

    def _check_data_size(self) -> None:
        expected = int(self.sequence_lengths.sum(dtype=np.int64)) * self.dtype.itemsize
        actual = os.path.getsize(self.data_path)
        if actual != expected:
            raise ValueError(
                f"{self.data_path} has {actual} bytes, but {self.index_path} describes {expected}: the two are not of "
                "one run, or a copy is incomplete; copy both again or preprocess again"
            )


def missing_file(prefix: str) -> str | None:
    """Which file of `prefix` does not exist, and which prefix may be meant; None if both do.

    Prefixes that are near: with the name that preprocessing appends, or without a file's ending.
    """
    missing = [path for path in (f"{prefix}.idx", f"{prefix}.bin") if not os.path.isfile(path)]
    if not missing:
        return None
    folder, name = os.path.split(prefix)
    longer = [
        path.removesuffix(".idx") for path in glob.glob(os.path.join(glob.escape(folder), glob.escape(name) + "_*.idx"))
    ]
    whole = prefix.removesuffix(".bin").removesuffix(".idx")
    near = [whole] if whole != prefix and os.path.isfile(f"{whole}.idx") else sorted(longer)[:3]
    meant = f"; did you mean {' or '.join(near)}?" if near else ""
    return f"{missing[0]} does not exist; give the prefix of PREFIX.bin and PREFIX.idx, without the ending{meant}"


def _map(path: str, dtype: np.dtype) -> np.ndarray:
    """The whole file as a read-only array."""
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
            f"{path} cannot be mapped into memory: this process has as many maps or as much address space as the system "
            "allows; merge data sets (tools/merge_datasets.py), or raise the limit (sysctl vm.max_map_count, ulimit -v)"
        ) from None


class _Index(NamedTuple):
    dtype: np.dtype
    lengths: np.ndarray  # [N]
    starts: np.ndarray  # [N], in bytes
    documents: np.ndarray  # [D]
    modes: np.ndarray  # [N], or [0] where there are none


def _read_index(path: str, multimodal: bool) -> _Index:
    """What PREFIX.idx holds; its header and its size are checked. Raises ValueError."""
    content = _map(path, np.dtype(np.uint8))
    if len(content) < HEADER.size or content[: len(MAGIC)].tobytes() != MAGIC:
        raise ValueError(f"{path} is no index of a token file: its first bytes are wrong; preprocess again")
    header = HEADER.unpack(content[: HEADER.size].tobytes())
    version, code = header[1:3]
    sequences, documents = header[3:]
    if version != VERSION:
        raise ValueError(f"{path} has version {version}; this reader knows version {VERSION}; preprocess again")
    if code not in DTYPES:
        raise ValueError(f"{path} has the unknown dtype code {code}, known are 1 to {len(DTYPES)}; preprocess again")
    without_modes = HEADER.size + 12 * sequences + 8 * documents
    expected = without_modes + sequences * multimodal
    if sequences and {len(content), expected} == {without_modes, without_modes + sequences}:
        carries = "no mode for each sequence: it is" if multimodal else "a mode for each sequence: it seems"
        raise ValueError(
            f"{path} carries {carries} {'not ' * multimodal}multimodal; open it with multimodal={not multimodal}"
        )
    if len(content) != expected:
        raise ValueError(
            f"{path} has {len(content)} bytes, its header describes {expected}: a copy is incomplete, or the file is "
            "damaged; copy it again or preprocess again"
        )
    parts = np.split(content[HEADER.size :], [4 * sequences, 12 * sequences, without_modes - HEADER.size])
    kinds = ("<i4", "<i8", "<i8", "i1")
    return _Index(np.dtype(DTYPES[code]), *(part.view(kind) for part, kind in zip(parts, kinds)))


def _check_sequences(path: str, index: _Index) -> None:
    """Raise ValueError unless no length is negative and every sequence begins where the one before it ends."""
    lengths, starts = index.lengths, index.starts
    start, itemsize = 0, index.dtype.itemsize
    for first in range(0, len(lengths), AT_ONCE):
        some = lengths[first : first + AT_ONCE].astype(np.int64)
        if some.min() < 0:
            at = first + int(np.argmax(some < 0))
            raise ValueError(f"{path}: sequence {at} has the negative length {lengths[at]}; preprocess again")
        ends = start + np.cumsum(some) * itemsize
        wrong = starts[first : first + AT_ONCE] != ends - some * itemsize
        if wrong.any():
            at = first + int(np.argmax(wrong))
            raise ValueError(
                f"{path}: sequence {at} starts at byte {starts[at]}, not where {at - 1} ends; preprocess again"
            )
        start = int(ends[-1])


def _check_documents(path: str, documents: np.ndarray, sequences: int) -> None:
    """Raise ValueError unless the document array starts with 0, never falls, and ends with the number of sequences."""
    whole = len(documents) > 0 and documents[0] == 0 and documents[-1] == sequences
    if not whole or (documents[1:] < documents[:-1]).any():
        raise ValueError(f"{path}: documents must rise from 0 to {sequences}, the sequences; preprocess again")
