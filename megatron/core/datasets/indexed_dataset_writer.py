"""Write token files, PREFIX.bin and PREFIX.idx, document by document; `mmap_indexed_dataset` describes the format."""

import contextlib
import glob
import os
import struct
from pathlib import Path
from typing import BinaryIO

import numpy as np

from megatron.core.datasets.mmap_indexed_dataset import CHUNK_SEQUENCES, DTYPES, HEADER, MAGIC, VERSION
from megatron.core.storage.atomic_file import UnpublishedFile, atomic_file, remove_abandoned

_CODES = {np.dtype(dtype): code for code, dtype in DTYPES.items()}
_FILES = ("bin", "idx.lengths", "idx.documents", "idx.modes")  # temporary files while documents are added
_COPY_BYTES = 1 << 20  # copied at a time
Integers = list[int] | np.ndarray


class IndexedDatasetWriter:
    """Writes PREFIX.bin and PREFIX.idx document by document, in constant memory.

        with IndexedDatasetWriter(prefix, np.uint16) as writer:
            writer.add_document(tokens)

    Both files appear when the block ends; after an error neither does, and earlier files stay. Until then lengths and
    document ends are written to side files, so that memory does not grow. One process owns a prefix. multimodal: every
    sequence has a mode.
    """

    def __init__(self, prefix: str | Path, dtype: type | np.dtype, *, multimodal: bool = False):
        self.prefix = str(prefix)
        self.multimodal = multimodal
        self.dtype = np.dtype(dtype)
        if self.dtype not in _CODES:
            raise ValueError(f"tokens of dtype {self.dtype} cannot be stored; give one of {[str(d) for d in _CODES]}")
        self.documents = 0
        self.sequences = 0
        self.tokens = 0
        self._cleanup = contextlib.ExitStack()

    def __enter__(self) -> "IndexedDatasetWriter":
        remove_abandoned(*_folder_and_pattern(self.prefix))
        with contextlib.ExitStack() as stack:  # removes the files that are open if opening another one fails
            files = [stack.enter_context(UnpublishedFile(f"{self.prefix}.{ending}")) for ending in _FILES]
            self._data, self._lengths, self._documents, self._modes = files
            self._cleanup = stack.pop_all()
        self._documents.file.write(struct.pack("<q", 0))
        return self

    def __exit__(self, kind: type | None, *_: object) -> None:
        with self._cleanup:
            if kind is None:
                self._finish()

    def add_document(self, tokens: Integers, lengths: list[int] | None = None, modes: list[int] | None = None) -> None:
        """Add one document.

        tokens: [tokens], integers. lengths: [sequences], tokens of each of its sequences; None: it is one sequence.
        modes: [sequences], of a multimodal file alone. Raises ValueError for numbers that do not fit together, or
        tokens that the dtype cannot hold.
        """
        if lengths is None:
            lengths = [len(tokens)]
        self.add_documents(tokens, lengths, [len(lengths)], modes)

    def add_documents(
        self, tokens: Integers, lengths: Integers, sequences: Integers, modes: Integers | None = None
    ) -> None:
        """Add several documents.

        tokens: [tokens], all of them end to end; lengths: [sequences], tokens of each; sequences: [documents], in each
        document; modes: [sequences], of a multimodal file alone. Raises ValueError as `add_document` does.
        """
        tokens = _as_integers(tokens)
        lengths, sequences = _check_lengths(lengths, sequences, len(tokens))
        num_modes = "none" if modes is None else len(modes)
        expected = len(lengths) if self.multimodal else "none"
        if num_modes != expected:
            raise ValueError(
                f"{len(lengths)} sequences with {num_modes} modes; give one mode for each sequence in a "
                "multimodal file, and none otherwise"
            )
        self._data.file.write(_as_dtype(tokens, self.dtype).tobytes())
        if self.multimodal:
            self._modes.file.write(_as_dtype(_as_integers(modes), np.dtype(np.int8)).tobytes())
        self._add_to_index(lengths, sequences)

    def copy_documents(self, source: BinaryIO, offset: int, lengths: Integers, sequences: Integers) -> None:
        """Add several documents whose tokens are the bytes of `source` from `offset` on, little-endian in this dtype.

        lengths and sequences: as in `add_documents`. The bytes are copied in constant memory, without arrays. Raises
        ValueError if `source` has too few, and for multimodal files, whose modes would be missing.
        """
        if self.multimodal:
            raise ValueError(f"{self.prefix} is multimodal; add its documents with their modes")
        lengths, sequences = _check_lengths(lengths, sequences)
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
            # the lengths
            for chunk in self._lengths.chunks(4 * CHUNK_SEQUENCES):
                index.write(chunk)
            # the byte at which each sequence begins
            start = 0
            for chunk in self._lengths.chunks(4 * CHUNK_SEQUENCES):
                sizes = np.frombuffer(chunk, "<i4").astype(np.int64) * self.dtype.itemsize
                ends = start + np.cumsum(sizes)
                index.write((ends - sizes).astype("<i8").tobytes())
                start = int(ends[-1])
            # the documents and the modes
            for side_file in (self._documents, self._modes):
                for chunk in side_file.chunks(8 * CHUNK_SEQUENCES):
                    index.write(chunk)
            with contextlib.suppress(FileNotFoundError):
                os.remove(f"{self.prefix}.idx")  # an index of earlier data must not be read with the new tokens
            self._data.publish()


def _folder_and_pattern(prefix: str) -> tuple[Path, str]:
    """Return the folder and the file name pattern of the temporary files of a writer of `prefix`."""
    path = Path(prefix)
    return path.parent, f"{glob.escape(path.name)}.[bi][id][nx].*"


def _as_integers(values: Integers) -> np.ndarray:
    """Return `values` as an array; an empty list becomes int64, where numpy makes it float64."""
    array = np.asarray(values)
    return array if array.size else array.astype(np.int64)


def _check_lengths(lengths: Integers, sequences: Integers, tokens: int | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Return both as arrays. Raises ValueError unless they fit each other and, if given, the number of tokens."""
    lengths = _as_integers(lengths)
    sequences = _as_integers(sequences)
    total = lengths.sum(dtype=np.int64)
    shortest = lengths.min(initial=0)
    if tokens is None:
        tokens = total
    if sequences.sum() != len(lengths) or shortest < 0 or tokens != total:
        raise ValueError(
            f"the totals do not agree, or a length is negative: {tokens} tokens; {len(lengths)} sequences with {total} "
            f"tokens in all and at least {shortest} each; {len(sequences)} documents with {sequences.sum()} sequences "
            "in all"
        )
    if lengths.max(initial=0) > np.iinfo(np.int32).max:
        raise ValueError(f"a sequence of {lengths.max()} tokens is too long; the format allows at most 2**31 - 1")
    return lengths, sequences


def _copy_bytes(source: BinaryIO, offset: int, target: BinaryIO, count: int) -> None:
    """Copy `count` bytes of `source` from `offset` on to the end of `target`, _COPY_BYTES at a time."""
    past = offset + count
    while offset < past:
        chunk = os.pread(source.fileno(), min(past - offset, _COPY_BYTES), offset)
        if not chunk:
            raise ValueError(f"{source.name} ends {past - offset} bytes too early: it is damaged, or was cut off")
        target.write(chunk)
        offset += len(chunk)


def _as_dtype(tokens: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Return `tokens` [n] in the dtype of the file. Raises ValueError where that would change a value."""
    if tokens.ndim != 1:
        raise ValueError(f"tokens must be a flat list of numbers, not of shape {tokens.shape}")
    stored = tokens.astype(dtype.newbyteorder("<"))
    if stored.dtype != tokens.dtype and not np.array_equal(stored, tokens):
        raise ValueError(f"tokens from {tokens.min()} to {tokens.max()} do not fit {dtype}; use a wider dtype")
    return stored
