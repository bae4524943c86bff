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
from pathlib import Path
from typing import BinaryIO

import numpy as np

from megatron.core.storage.atomic import UnpublishedFile, atomic_file, remove_abandoned

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")
DTYPES = {1: np.uint8, 2: np.int8, 3: np.int16, 4: np.int32, 5: np.int64, 6: np.float64, 7: np.float32, 8: np.uint16}
_CODES = {np.dtype(dtype): code for code, dtype in DTYPES.items()}

_COPY_AT_ONCE = 1 << 24  # bytes
_AT_ONCE = 1 << 16  # sequences handled at a time, so that memory stays constant: half a MB an array


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
        for path in (self.index_path, self.data_path):
            if not os.path.isfile(path):
                raise FileNotFoundError(
                    f"{path} does not exist; give the prefix of PREFIX.bin and PREFIX.idx, without the ending"
                    + meant_prefix(self.prefix)
                )
        self.dtype, *arrays = _read_index(self.index_path, multimodal)
        self.sequence_lengths, self._starts, self.document_indices, modes = arrays
        self.sequence_modes = modes if multimodal else None
        _check_sequences(self.index_path, self.sequence_lengths, self._starts, self.dtype.itemsize)
        _check_documents(self.index_path, self.document_indices, len(self))
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
        first, past, step = key.indices(len(self))
        if step != 1:
            raise ValueError(f"{self.data_path} is read in one piece: a slice must have step 1, not {step}")
        return [self.get(i) for i in range(first, past)]

    def get(self, i: int, offset: int = 0, length: int | None = None) -> np.ndarray:
        """Tokens [offset, offset + length) of sequence i; length None reads to its end."""
        number = operator.index(i)
        if not -len(self) <= number < len(self):
            raise IndexError(f"sequence {number} of {self.index_path}, which has {len(self)}")
        tokens = int(self.sequence_lengths[number])
        length = tokens - offset if length is None else length
        if offset < 0 or length < 0 or offset + length > tokens:
            raise IndexError(
                f"tokens {offset} to {offset + length} of sequence {number} of {self.index_path}, which has {tokens}"
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


def meant_prefix(prefix: str) -> str:
    """The prefix that was perhaps meant, for a message: with what preprocessing appends to it, or without a file's ending."""
    folder, name = os.path.split(prefix)
    longer = [
        path.removesuffix(".idx") for path in glob.glob(os.path.join(glob.escape(folder), glob.escape(name) + "_*.idx"))
    ]
    whole = prefix.removesuffix(".bin").removesuffix(".idx")
    near = [whole] if whole != prefix and os.path.isfile(f"{whole}.idx") else sorted(longer)[:3]
    return f"; did you mean {' or '.join(near)}?" if near else ""


def _map(path: str, dtype: np.dtype) -> np.ndarray:
    """The whole file as a read-only array."""
    if os.path.getsize(path) == 0:  # an empty file cannot be mapped
        return np.empty(0, dtype)
    try:
        return np.asarray(np.memmap(path, dtype=dtype, mode="r"))
    except OSError as error:
        raise (unmapped(path) if error.errno == errno.ENOMEM else error) from None


def unmapped(path: str | Path) -> ValueError:
    """What to say of a file that the system would not map, as of one data set of ten thousand: each takes ten maps or so."""
    return ValueError(
        f"{path} cannot be mapped into memory: this process has as many maps or as much address space as the system "
        "allows; merge data sets (tools/merge_datasets.py), or raise the limit (sysctl vm.max_map_count, ulimit -v)"
    )


def _read_index(path: str, multimodal: bool) -> tuple[np.dtype, np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """(dtype, lengths [N], starts [N] in bytes, document array [D], modes [N] or [0]); header and file size are checked."""
    content = _map(path, np.dtype(np.uint8))
    if len(content) < HEADER.size or content[: len(MAGIC)].tobytes() != MAGIC:
        raise ValueError(
            f"{path} does not begin as an index of tokens does: it is another kind of file, or damaged; preprocess "
            "again"
        )
    _, version, code, sequences, documents = HEADER.unpack(content[: HEADER.size].tobytes())
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
    ends = [4 * sequences, 12 * sequences, without_modes - HEADER.size]
    lengths, starts, document_array, modes = np.split(content[HEADER.size :], ends)
    arrays = lengths.view("<i4"), starts.view("<i8"), document_array.view("<i8"), modes.view("i1")
    return np.dtype(DTYPES[code]), *arrays


def _check_sequences(path: str, lengths: np.ndarray, starts: np.ndarray, itemsize: int) -> None:
    """Raise ValueError unless no length is negative and every sequence begins where the one before it ends."""
    start = 0
    for first in range(0, len(lengths), _AT_ONCE):
        some = lengths[first : first + _AT_ONCE].astype(np.int64)
        if some.min() < 0:
            at = first + int(np.argmax(some < 0))
            raise ValueError(f"{path}: sequence {at} has the negative length {lengths[at]}; preprocess again")
        ends = start + np.cumsum(some) * itemsize
        wrong = starts[first : first + _AT_ONCE] != ends - some * itemsize
        if wrong.any():
            at = first + int(np.argmax(wrong))
            raise ValueError(
                f"{path}: sequence {at} begins at byte {starts[at]}, which is not the end of the one before it; "
                "preprocess again"
            )
        start = int(ends[-1])


def _check_documents(path: str, documents: np.ndarray, sequences: int) -> None:
    """Raise ValueError unless the document array starts with 0, never falls, and ends with the number of sequences."""
    whole = len(documents) > 0 and documents[0] == 0 and documents[-1] == sequences
    if not whole or (documents[1:] < documents[:-1]).any():
        raise ValueError(
            f"{path}: the document array must rise from 0 to the number of sequences ({sequences}); preprocess again"
        )


class IndexedDatasetWriter:
    """Writes PREFIX.bin and PREFIX.idx document by document, in constant memory.

        with IndexedDatasetWriter(prefix, np.uint16) as writer:
            writer.add_document(tokens)

    Both files appear when the block ends; after an error neither does, and files that were there before stay. Lengths
    and document ends go to side files meanwhile. One process owns a prefix. multimodal: every sequence has a mode.
    """

    def __init__(self, prefix: str | Path, dtype: type | np.dtype, *, multimodal: bool = False):
        self.prefix = str(prefix)
        self.multimodal = multimodal
        self.dtype = np.dtype(dtype)
        if self.dtype not in _CODES:
            raise ValueError(f"tokens of dtype {self.dtype} cannot be stored; use one of {[str(d) for d in _CODES]}")
        self.sequences = 0
        self.documents = 0
        self.tokens = 0
        self._cleanup = contextlib.ExitStack()

    def __enter__(self) -> "IndexedDatasetWriter":
        remove_abandoned(*_folder_and_pattern(self.prefix))
        with contextlib.ExitStack() as opened:
            self._data = opened.enter_context(UnpublishedFile(f"{self.prefix}.bin"))
            self._lengths = opened.enter_context(UnpublishedFile(f"{self.prefix}.idx.lengths"))
            self._documents = opened.enter_context(UnpublishedFile(f"{self.prefix}.idx.documents"))
            self._modes = opened.enter_context(UnpublishedFile(f"{self.prefix}.idx.modes"))
            self._cleanup = opened.pop_all()
        self._documents.file.write(struct.pack("<q", 0))
        return self

    def __exit__(self, kind: type | None, *_: object) -> None:
        with self._cleanup:
            if kind is None:
                self._finish()

    def add_document(
        self, tokens: list[int] | np.ndarray, lengths: list[int] | None = None, modes: list[int] | None = None
    ) -> None:
        """One document. lengths: tokens of each of its sequences; None: it is one sequence. modes: of each sequence."""
        lengths = [len(tokens)] if lengths is None else lengths
        self.add_documents(tokens, lengths, [len(lengths)], modes)

    def add_documents(
        self,
        tokens: list[int] | np.ndarray,
        lengths: list[int] | np.ndarray,
        sequences: list[int] | np.ndarray,
        modes: list[int] | np.ndarray | None = None,
    ) -> None:
        """Several documents. tokens: all of them end to end; lengths: of each sequence; sequences: in each document."""
        tokens, lengths, sequences = _integers(tokens), _integers(lengths), _integers(sequences)
        if lengths.sum() != len(tokens) or sequences.sum() != len(lengths) or (lengths < 0).any():
            raise ValueError(
                f"{len(tokens)} tokens do not make {len(lengths)} sequences of {lengths.sum()} tokens together in "
                f"{len(sequences)} documents of {sequences.sum()} sequences together"
            )
        if lengths.max(initial=0) > np.iinfo(np.int32).max:
            raise ValueError(f"a sequence of {lengths.max()} tokens is too long; the format ends at 2**31 - 1")
        if self.multimodal != (modes is not None) or (self.multimodal and len(modes) != len(lengths)):
            given = "none" if modes is None else len(modes)
            raise ValueError(
                f"{len(lengths)} sequences with {given} modes; multimodal files have one each, others none"
            )
        self._data.file.write(_stored(tokens, self.dtype).tobytes())
        self._lengths.file.write(lengths.astype("<i4").tobytes())
        self._documents.file.write((self.sequences + np.cumsum(sequences)).astype("<i8").tobytes())
        if self.multimodal:
            self._modes.file.write(_stored(_integers(modes), np.dtype(np.int8)).tobytes())
        self.tokens += len(tokens)
        self.sequences += len(lengths)
        self.documents += len(sequences)

    def copy_documents(
        self, source: BinaryIO, offset: int, lengths: list[int] | np.ndarray, sequences: list[int] | np.ndarray
    ) -> None:
        """As `add_documents`, the tokens being the bytes of `source` from `offset` on, little-endian in this dtype.

        The operating system copies them from file to file. Raises ValueError if `source` has too few. Not for multimodal
        files, whose modes it would leave out.
        """
        if self.multimodal:
            raise ValueError(f"{self.prefix} is multimodal; add its documents with their modes")
        lengths, sequences = _integers(lengths).astype("<i4"), _integers(sequences)
        if sequences.sum() != len(lengths) or (lengths < 0).any():
            raise ValueError(
                f"{len(lengths)} sequences, the shortest of {lengths.min(initial=0)} tokens, do not make {len(sequences)} "
                f"documents of {sequences.sum()} sequences together"
            )
        tokens, itemsize = int(lengths.sum(dtype=np.int64)), self.dtype.itemsize
        _copy_bytes(source, offset, self._data.file, self.tokens * itemsize, tokens * itemsize)
        self._lengths.file.write(lengths.tobytes())
        self._documents.file.write((self.sequences + np.cumsum(sequences)).astype("<i8").tobytes())
        self.tokens += tokens
        self.sequences += len(lengths)
        self.documents += len(sequences)

    def _finish(self) -> None:
        """Write the index, then give both files their names: the index last, since a reader looks for it first."""
        with atomic_file(f"{self.prefix}.idx") as index:
            code = _CODES[self.dtype]
            index.write(HEADER.pack(MAGIC, VERSION, code, self.sequences, self.documents + 1))
            for some in self._lengths.chunks(4 * _AT_ONCE):
                index.write(some)
            start = 0
            for some in self._lengths.chunks(4 * _AT_ONCE):
                sizes = np.frombuffer(some, "<i4").astype(np.int64) * self.dtype.itemsize
                ends = start + np.cumsum(sizes)
                index.write((ends - sizes).astype("<i8").tobytes())
                start = int(ends[-1])
            for side_file in (self._documents, self._modes):
                for some in side_file.chunks(8 * _AT_ONCE):
                    index.write(some)
            with contextlib.suppress(FileNotFoundError):
                os.remove(f"{self.prefix}.idx")  # an index of earlier data must not meet the new tokens
            self._data.publish()


def _folder_and_pattern(prefix: str) -> tuple[Path, str]:
    """Where the temporary files of a writer of `prefix` are."""
    path = Path(prefix)
    return path.parent, f"{glob.escape(path.name)}.[bi][id][nx].*"


def _integers(values: list[int] | np.ndarray) -> np.ndarray:
    """`values` as an array; an empty list would be one of float64 otherwise."""
    array = np.asarray(values)
    return array if array.size else array.astype(np.int64)


def _copy_bytes(source: BinaryIO, offset: int, target: BinaryIO, position: int, count: int) -> None:
    """Copy `count` bytes to the end of `target`, which is at `position`; ends with `target` positioned after them."""
    target.flush()
    past = offset + count
    by_system = hasattr(os, "copy_file_range")
    while offset < past:
        wanted = min(past - offset, _COPY_AT_ONCE)
        try:
            if by_system:
                copied = os.copy_file_range(source.fileno(), target.fileno(), wanted, offset, position)
            else:
                copied = os.pwrite(target.fileno(), os.pread(source.fileno(), wanted, offset), position)
        except OSError as error:
            if by_system and error.errno in (errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP):
                by_system = False  # not between these two file systems
                continue
            raise
        if copied == 0:
            raise ValueError(f"{source.name} ends {past - offset} bytes early: it is damaged, or was cut off")
        offset, position = offset + copied, position + copied
    target.seek(position)


def _stored(tokens: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """`tokens` in the dtype of the file, or ValueError where that would change a value."""
    if tokens.ndim != 1:
        raise ValueError(f"tokens must be a flat list of numbers, not of shape {tokens.shape}")
    stored = tokens.astype(dtype.newbyteorder("<"))
    if stored.dtype != tokens.dtype and not np.array_equal(stored, tokens):
        raise ValueError(
            f"tokens from {tokens.min()} to {tokens.max()} do not fit the file's dtype {dtype}; is the vocabulary "
            "larger than the writer was told?"
        )
    return stored
