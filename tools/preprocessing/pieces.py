"""Finished pieces on disk: written by workers, reused after a kill, copied from file to file into the output.

    PREFIX.pieces/lock                   locked by the active run
    PREFIX.pieces/000012-<hash>.piece    the tokens of piece 12

The hash covers the piece's text and all settings that its tokens depend on, so an existing file is valid. A file gets
its name when it is complete. Its content:

    a line of JSON          documents, bytes of text, bad lines, and for each key [tokens, sequences, documents]
    for each key            int32 length of each sequence, int64 sequences of each document, tokens
"""

import contextlib
import hashlib
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from megatron.core.datasets.indexed_dataset_writer import IndexedDatasetWriter
from megatron.core.storage.atomic_file import atomic_file
from megatron.core.storage.file_lock import locked
from tools.preprocessing.encode import Encoded
from tools.preprocessing.sources import Piece


@dataclass(frozen=True)
class PieceStore:
    """The folder of a run's pieces. settings: a text that differs whenever the same input may give other tokens."""

    folder: str
    settings: str

    def path(self, piece: Piece) -> str:
        """Return the file of a piece, named by a hash of its text and of the settings."""
        digest = hashlib.blake2b(self.settings.encode(), digest_size=16)
        for chunk in piece.chunks:
            digest.update(f"{chunk.path}\n{chunk.first}\n{len(chunk.text)}\n".encode("utf-8", "surrogateescape"))
            digest.update(chunk.text)
        return os.path.join(self.folder, f"{piece.number:06}-{digest.hexdigest()}.piece")

    @contextlib.contextmanager
    def claimed(self) -> Iterator[None]:
        """Lock the folder within the block, and remove it at the end if it contains no pieces.

        Raises ValueError if another run has locked it.
        """
        os.makedirs(self.folder, exist_ok=True)
        lock_path = Path(self.folder, "lock")
        with open(lock_path, "w") as lock_file:
            with naming(str(lock_path)):
                is_locked = locked(lock_file)
            if not is_locked:
                raise ValueError(f"another run holds {lock_path}; wait for it, or choose another --output-prefix")
            self._remove(".tmp")  # left by a killed run
            try:
                yield
            finally:
                if not any(self._files(".piece")):
                    lock_path.unlink()
                    os.rmdir(self.folder)

    def clear(self) -> None:
        """Remove all pieces: the output is complete."""
        self._remove(".piece")

    def _files(self, ending: str) -> Iterator[str]:
        """Yield the paths of the files with this ending; there may be a million."""
        with os.scandir(self.folder) as entries:
            yield from (entry.path for entry in entries if entry.name.endswith(ending))

    def _remove(self, ending: str) -> None:
        while next(self._files(ending), None):  # repeat: removals during a listing may hide files from it
            for path in self._files(ending):
                os.unlink(path)


def write_piece(path: str, encoded: Encoded) -> None:
    """Write a piece under a temporary name and rename it when it is complete. Raises OSError that names the file."""
    columns = {key: [len(c.tokens), len(c.lengths), len(c.counts)] for key, c in encoded.columns.items()}
    header = vars(encoded) | {"columns": columns}
    with naming(path), atomic_file(path) as file:
        file.write(json.dumps(header).encode() + b"\n")
        for column in encoded.columns.values():
            for array in (column.lengths, column.counts, column.tokens):
                file.write(array.data)


def read_summary(path: str) -> Encoded:
    """Read the summary of a stored piece: `Encoded` without columns."""
    with open(path, "rb") as file:
        header = _read_header(path, file)
    return Encoded(**header | {"columns": {}})


def append_piece(path: str, writers: dict[str, IndexedDatasetWriter]) -> None:
    """Append a stored piece to each key's output. Tokens are copied from file to file, in constant memory."""
    with open(path, "rb") as file:
        header = _read_header(path, file)
        for key, (tokens, sequences, documents) in header["columns"].items():
            lengths = np.frombuffer(file.read(4 * sequences), "<i4")
            counts = np.frombuffer(file.read(8 * documents), "<i8")
            offset = file.tell()
            writers[key].copy_documents(file, offset, lengths, counts)
            file.seek(offset + tokens * writers[key].dtype.itemsize)


def _read_header(path: str, file: BinaryIO) -> dict[str, Any]:
    """Read the header of a piece. Raises ValueError for a damaged file."""
    try:
        return json.loads(file.readline())
    except ValueError:
        raise ValueError(f"{path} is damaged; delete it and run the same command again") from None


@contextlib.contextmanager
def naming(path: str) -> Iterator[None]:
    """Add the file name to an OSError without one, such as that of a full disk."""
    try:
        yield
    except OSError as error:
        if error.filename is None and error.errno is not None:
            raise OSError(error.errno, error.strerror, path) from error
        raise


def file_digest(path: str) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def settings_text(*configs: dict[str, Any]) -> str:
    """Return a text that changes when a setting does, or the content of a file that a setting names.

    Of a folder that a setting names, the *.json files count.
    """
    files: list[str] = []
    for config in configs:
        for value in config.values():
            if not isinstance(value, str) or not os.path.exists(value):
                continue
            if os.path.isfile(value):
                files.append(value)
            else:
                files += sorted(map(str, Path(value).glob("*.json")))
    return json.dumps([configs, [file_digest(path) for path in files]])
