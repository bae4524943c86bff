"""Read text files of any size and kind as numbered pieces of whole lines, in constant memory.

    files   a.jsonl          b.jsonl.gz         -
    chunks  |====|====|==|   |====|===|   |====|      whole lines of one file, 256 KB and the rest of a line
    pieces  |0      |1        |2         |3           chunks in a row: 256 KB at first, up to 1 MB in a large input

The ends of pieces depend on the lines alone, not on the workers or the input's size. So a resumed run cuts the same pieces, and
a corrected line rarely changes any piece but its own.
"""

import contextlib
import functools
import glob
import gzip
import json
import os
import sys
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from megatron.core.base.lazy_imports import optional_package

STDIN = "-"
ENDINGS = (".jsonl", ".json", ".jsonl.gz", ".json.gz", ".jsonl.zst", ".json.zst", ".parquet")

LONGEST_LINE_MB = 64  # default of --max-line-mb

_CHUNK_BYTES = 256 << 10
_PIECES_A_SIZE = 8  # so many pieces of 256 KB, then as many of 512 KB, ...
_LARGEST_PIECE = 1 << 20  # reached after 6 MB; larger ones take more memory and no less time
_ZSTD_BYTES = 256  # read at a time: 4 bytes of zstd can decompress to 128 KB, so 256 give at most 8 MB
_PARQUET_ROWS = 256


class Chunk(NamedTuple):
    """Neighbouring lines of one file; the first has number `first`, counted from 1."""

    path: str
    first: int
    text: bytes


class Piece(NamedTuple):
    """Consecutive chunks. position: bytes of the input files read up to its end, None if unknown."""

    number: int
    chunks: list[Chunk]
    position: int | None


class Source(NamedTuple):
    """An open file. blocks: its text in parts of any size. position: bytes of the file read so far, None if unknown."""

    blocks: Iterator[bytes]
    position: Callable[[], int | None]


def input_files(patterns: list[str], endings: tuple[str, ...] = ENDINGS) -> list[str]:
    """The files that `patterns` name: files, folders (their files with one of `endings`, at any depth), globs, or "-"."""
    files = []
    for pattern in patterns:
        if pattern == STDIN:
            found = [STDIN]
        elif os.path.isdir(pattern):
            found = sorted(str(p) for p in Path(pattern).rglob("*") if p.name.endswith(endings) and p.is_file())
        else:
            found = [pattern] if _is_file(pattern) else sorted(filter(_is_file, glob.glob(pattern)))
        if not found:
            raise ValueError(f"--input {pattern}: no such file, or no file in it ends in {' or '.join(endings)}")
        files += found
    streams = list(filter(_is_stream, files))
    if twice := [path for path in streams if streams.count(path) > 1]:
        name = f"standard input ({STDIN})" if twice[0] == STDIN else f"the pipe {twice[0]}"
        raise ValueError(f"--input names {name} twice; it can be read once")
    return files


def _is_file(path: str) -> bool:
    return os.path.isfile(path) or _is_stream(path)


def _is_stream(path: str) -> bool:
    """Whether `path` is standard input or a pipe (as in <(command)): readable once, of unknown length."""
    return path == STDIN or (os.path.exists(path) and not os.path.isfile(path) and not os.path.isdir(path))


def total_size(files: list[str]) -> int | None:
    """Bytes of the files; None if one is standard input or a pipe."""
    return None if any(map(_is_stream, files)) else sum(map(os.path.getsize, files))


def read_pieces(files: list[str], keys: list[str], longest_line: int = LONGEST_LINE_MB << 20) -> Iterator[Piece]:
    """All text of all files, in order. keys: the columns to read from Parquet files.

    longest_line: in bytes; it bounds the memory, whatever a compressed file expands to. Raises ValueError for a longer line or a
    damaged file, ImportError for a missing package.
    """
    number, before = 0, 0
    chunks: list[Chunk] = []
    for path in files:
        with _open_source(path, keys) as source:
            for chunk in _chunks(path, source.blocks, longest_line):
                chunks.append(chunk)
                if sum(len(chunk.text) for chunk in chunks) >= piece_bytes(number):
                    read = source.position()
                    yield Piece(number, chunks, None if read is None else before + read)
                    number, chunks = number + 1, []
        before += 0 if _is_stream(path) else os.path.getsize(path)
    if chunks:
        yield Piece(number, chunks, before)


def piece_bytes(number: int) -> int:
    """Minimum size of a piece: small at first, so that a small input also occupies several workers."""
    return min(_LARGEST_PIECE, _CHUNK_BYTES << min(number // _PIECES_A_SIZE, 20))


def _chunks(path: str, blocks: Iterator[bytes], longest_line: int) -> Iterator[Chunk]:
    """The lines of a file; a chunk ends at the first line end past 256 KB."""
    buffer = bytearray()
    first, searched = 1, _CHUNK_BYTES - 1
    for block in blocks:
        buffer += block
        while (end := buffer.find(b"\n", searched)) >= 0:
            text = bytes(buffer[: end + 1])
            del buffer[: end + 1]
            yield Chunk(path, first, text)
            first, searched = first + text.count(b"\n"), _CHUNK_BYTES - 1
        searched = max(searched, len(buffer))
        if searched > longest_line:
            line = first + buffer.count(b"\n")
            raise ValueError(
                f"{path}:{line}: a line of more than {longest_line >> 20} MB (--max-line-mb); is it JSON lines? To allow such a "
                "document, raise the limit, if there is memory for a hundred times as much"
            )
    if buffer:
        yield Chunk(path, first, bytes(buffer))


@contextlib.contextmanager
def _open_source(path: str, keys: list[str]) -> Iterator[Source]:
    if path == STDIN:
        yield Source(_read_blocks(sys.stdin.buffer), lambda: None)
        return
    with open(path, "rb") as file:
        if path.endswith(".parquet"):
            yield _parquet(path, file, keys)
        else:
            read = {".gz": _gzip_blocks, ".zst": _zstd_blocks}.get(Path(path).suffix)
            position = (lambda: None) if _is_stream(path) else file.tell
            yield Source(read(path, file) if read else _read_blocks(file), position)


def _read_blocks(file: BinaryIO) -> Iterator[bytes]:
    return iter(functools.partial(file.read, _CHUNK_BYTES), b"")


def _gzip_blocks(path: str, file: BinaryIO) -> Iterator[bytes]:
    try:
        with gzip.GzipFile(fileobj=file) as text:
            yield from _read_blocks(text)
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise ValueError(f"{path} is damaged or incomplete: {error}; copy it again") from None


def _zstd_blocks(path: str, file: BinaryIO) -> Iterator[bytes]:
    """The file's text, frame by frame, since the library's own reader does not notice a truncated file."""
    zstandard = optional_package("zstandard", path)
    frame = None
    try:
        for block in iter(functools.partial(file.read, _ZSTD_BYTES), b""):
            while block:
                frame = frame or zstandard.ZstdDecompressor(max_window_size=1 << 31).decompressobj()
                yield frame.decompress(block)
                block, frame = (frame.unused_data, None) if frame.eof else (b"", frame)
    except zstandard.ZstdError as error:
        raise ValueError(f"{path} is damaged: {error}; copy it again") from None
    if frame is not None:
        raise ValueError(f"{path} is incomplete: it ends within a frame; copy it again")


def _parquet(path: str, file: BinaryIO, keys: list[str]) -> Source:
    """The rows as JSON lines, as all later code reads them. Line n is row n."""
    pyarrow, parquet = (optional_package(name, path) for name in ("pyarrow", "pyarrow.parquet"))
    try:
        table = parquet.ParquetFile(file)
    except (pyarrow.ArrowException, OSError) as error:
        raise ValueError(f"{path} is no Parquet file, or damaged: {error}") from None
    names = table.schema_arrow.names
    if missing := [key for key in keys if key not in names]:
        raise ValueError(f"{path} has no column {missing[0]!r}; it has {', '.join(map(repr, names))}; see --json-keys")
    rows = 0

    def blocks() -> Iterator[bytes]:
        nonlocal rows
        try:
            for group in range(table.num_row_groups):  # pyarrow would keep memory of all groups
                for batch in table.iter_batches(_PARQUET_ROWS, [group], keys):
                    rows += batch.num_rows
                    yield b"".join(json.dumps(row, default=_unreadable).encode() + b"\n" for row in batch.to_pylist())
        except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
            raise ValueError(f"{path} is damaged near row {rows + 1}: {error}; copy it again") from None

    size, total = os.path.getsize(path), max(table.metadata.num_rows, 1)
    return Source(blocks(), lambda: size * rows // total)


def _unreadable(value: Any) -> None:
    """A value that JSON cannot hold, such as bytes, becomes null, which is then reported as no string."""
