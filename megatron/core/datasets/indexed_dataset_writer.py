"""Writing token files: PREFIX.bin and PREFIX.idx, in the format that `indexed` describes, document by document."""

import contextlib
import glob
import os
import struct
from pathlib import Path
from typing import BinaryIO

import numpy as np

from megatron.core.datasets.mmap_indexed_dataset import AT_ONCE, DTYPES, HEADER, MAGIC, VERSION
from megatron.core.storage.atomic_file import UnpublishedFile, atomic_file, remove_abandoned

_CODES = {np.dtype(dtype): code for code, dtype in DTYPES.items()}
_FILES = ("bin", "idx.lengths", "idx.documents", "idx.modes")  # temporary ones, while documents are added
_COPY_AT_ONCE = 1 << 20  # bytes
Integers = list[int] | np.ndarray


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
        self.sequences = self.documents = 0
        self.tokens = 0
        self._cleanup = contextlib.ExitStack()

    def __enter__(self) -> "IndexedDatasetWriter":
        remove_abandoned(*_folder_and_pattern(self.prefix))
        with contextlib.ExitStack() as opened:
            files = [opened.enter_context(UnpublishedFile(f"{self.prefix}.{ending}")) for ending in _FILES]
            self._data, self._lengths = files[:2]
            self._documents, self._modes = files[2:]
            self._cleanup = opened.pop_all()
        self._documents.file.write(struct.pack("<q", 0))
        return self

    def __exit__(self, kind: type | None, *_: object) -> None:
        with self._cleanup:
            if kind is None:
                self._finish()

    def add_document(self, tokens: Integers, lengths: list[int] | None = None, modes: list[int] | None = None) -> None:
        """One document. lengths: tokens of each of its sequences; None: it is one sequence. modes: of each sequence."""
        lengths = [len(tokens)] if lengths is None else lengths
        self.add_documents(tokens, lengths, [len(lengths)], modes)

    def add_documents(
        self, tokens: Integers, lengths: Integers, sequences: Integers, modes: Integers | None = None
    ) -> None:
        """Several documents. tokens: all of them end to end; lengths: of each sequence; sequences: in each document."""
        tokens = _integers(tokens)
        lengths, sequences = _checked(lengths, sequences, len(tokens))
        if self.multimodal != (modes is not None) or (self.multimodal and len(modes) != len(lengths)):
            given = "none" if modes is None else len(modes)
            raise ValueError(f"{len(lengths)} sequences with {given} modes; only multimodal files have one each")
        self._data.file.write(_stored(tokens, self.dtype).tobytes())
        if self.multimodal:
            self._modes.file.write(_stored(_integers(modes), np.dtype(np.int8)).tobytes())
        self._add_to_index(lengths, sequences)

    def copy_documents(self, source: BinaryIO, offset: int, lengths: Integers, sequences: Integers) -> None:
        """As `add_documents`, the tokens being the bytes of `source` from `offset` on, little-endian in this dtype.

        They are copied in constant memory and never made arrays. Raises ValueError if `source` has too few. Not for
        multimodal files, whose modes it would leave out.
        """
        if self.multimodal:
            raise ValueError(f"{self.prefix} is multimodal; add its documents with their modes")
        lengths, sequences = _checked(lengths, sequences)
        nbytes = int(lengths.sum(dtype=np.int64)) * self.dtype.itemsize
        _copy_bytes(source, offset, self._data.file, nbytes)
        self._add_to_index(lengths, sequences)

    def _add_to_index(self, lengths: np.ndarray, sequences: np.ndarray) -> None:
        self._lengths.file.write(lengths.astype("<i4").tobytes())
        self._documents.file.write((self.sequences + np.cumsum(sequences)).astype("<i8").tobytes())
        self.tokens += int(lengths.sum(dtype=np.int64))
        self.sequences += len(lengths)
        self.documents += len(sequences)

    def _finish(self) -> None:
        """Write the index, then give both files their names: the index last, since a reader looks for it first."""
        with atomic_file(f"{self.prefix}.idx") as index:
            code = _CODES[self.dtype]
            index.write(HEADER.pack(MAGIC, VERSION, code, self.sequences, self.documents + 1))
            for some in self._lengths.chunks(4 * AT_ONCE):
                index.write(some)
            start = 0
            for some in self._lengths.chunks(4 * AT_ONCE):
                sizes = np.frombuffer(some, "<i4").astype(np.int64) * self.dtype.itemsize
                ends = start + np.cumsum(sizes)
                index.write((ends - sizes).astype("<i8").tobytes())
                start = int(ends[-1])
            for side_file in (self._documents, self._modes):
                for some in side_file.chunks(8 * AT_ONCE):
                    index.write(some)
            with contextlib.suppress(FileNotFoundError):
                os.remove(f"{self.prefix}.idx")  # an index of earlier data must not meet the new tokens
            self._data.publish()


def _folder_and_pattern(prefix: str) -> tuple[Path, str]:
    """Where the temporary files of a writer of `prefix` are."""
    path = Path(prefix)
    return path.parent, f"{glob.escape(path.name)}.[bi][id][nx].*"


def _integers(values: Integers) -> np.ndarray:
    """`values` as an array; an empty list would be one of float64 otherwise."""
    array = np.asarray(values)
    return array if array.size else array.astype(np.int64)


def _checked(lengths: Integers, sequences: Integers, tokens: int | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Both as arrays. Raises ValueError unless they fit each other and, if given, the number of tokens."""
    lengths, sequences = _integers(lengths), _integers(sequences)
    total, least = lengths.sum(dtype=np.int64), lengths.min(initial=0)
    if sequences.sum() != len(lengths) or least < 0 or tokens not in (None, total):
        raise ValueError(
            f"{total if tokens is None else tokens} tokens do not make {len(lengths)} sequences of {total} tokens together, the "
            f"shortest of {least}, in {len(sequences)} documents of {sequences.sum()} sequences together"
        )
    if lengths.max(initial=0) > np.iinfo(np.int32).max:
        raise ValueError(f"a sequence of {lengths.max()} tokens is too long; the format ends at 2**31 - 1")
    return lengths, sequences


def _copy_bytes(source: BinaryIO, offset: int, target: BinaryIO, count: int) -> None:
    """Copy `count` bytes of `source` from `offset` on to the end of `target`, some at a time."""
    past = offset + count
    while offset < past:
        some = os.pread(source.fileno(), min(past - offset, _COPY_AT_ONCE), offset)
        if not some:
            raise ValueError(f"{source.name} ends {past - offset} bytes early: it is damaged, or was cut off")
        target.write(some)
        offset += len(some)


def _stored(tokens: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """`tokens` in the dtype of the file, or ValueError where that would change a value."""
    if tokens.ndim != 1:
        raise ValueError(f"tokens must be a flat list of numbers, not of shape {tokens.shape}")
    stored = tokens.astype(dtype.newbyteorder("<"))
    if stored.dtype != tokens.dtype and not np.array_equal(stored, tokens):
        raise ValueError(f"tokens from {tokens.min()} to {tokens.max()} do not fit {dtype}; use a wider dtype")
    return stored
