"""Read text files of any size and kind as numbered pieces of whole lines, in constant memory.

    files   a.jsonl          b.jsonl.gz         -
    chunks  |====|====|==|   |====|===|   |====|      whole lines of one file, 256 KB and the rest of a line
    pieces  |0      |1        |2         |3           chunks in a row: 256 KB at first, up to 1 MB in a large input

The ends of pieces depend on the lines alone, not on the workers or the input's size. So a resumed run cuts the same
pieces, and a corrected line rarely changes any piece but its own.
"""

import contextlib
import functools
import glob
import gzip
import itertools
import json
import os
import sys
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from megatron.core.base.lazy_imports import optional_package
from tools.waiting import STDIN, is_stream, waiting_for_text

ENDINGS = (".jsonl", ".json", ".jsonl.gz", ".json.gz", ".jsonl.zst", ".json.zst", ".parquet")

LONGEST_LINE_MB = 64  # default of --max-line-mb

_CHUNK_BYTES = 256 << 10
_PIECES_A_SIZE = 8  # the first 8 pieces have 256 KB, the next 8 have 512 KB, ...
_LARGEST_PIECE = 1 << 20  # reached after 6 MB; larger ones take more memory and no less time
_ZSTD_BYTES = 256  # compressed bytes read at a time: 4 bytes of zstd can decompress to 128 KB, so 256 give at most 8 MB
_PARQUET_ROWS = 256


class Chunk(NamedTuple):
    """Consecutive lines of one file."""

    path: str
    first: int  # number of the first line, counted from 1
    text: bytes


class Piece(NamedTuple):
    """Consecutive chunks, perhaps of several files."""

    number: int
    chunks: list[Chunk]
    position: int | None  # bytes of the input files up to its end; None if unknown


class Source(NamedTuple):
    """An open file."""

    blocks: Iterator[bytes]  # its text in parts of any size
    position: Callable[[], int | None]  # returns the bytes of the file read so far; None if unknown


def input_files(patterns: list[str], endings: tuple[str, ...] = ENDINGS) -> list[str]:
    """Return the input files in order.

    A pattern is a file, a glob, "-", or a folder, of which the files with one of `endings` count, at any depth.
    """
    files = []
    for pattern in patterns:
        if pattern == STDIN:
            matches = [STDIN]
        elif os.path.isdir(pattern):
            matches = sorted(str(p) for p in Path(pattern).rglob("*") if p.name.endswith(endings) and p.is_file())
        elif _is_file(pattern):
            matches = [pattern]
        else:
            matches = sorted(filter(_is_file, glob.glob(pattern)))
        if not matches:
            raise ValueError(f"--input {pattern}: no such file, or no file in it ends in {' or '.join(endings)}")
        files += matches
    streams = list(filter(is_stream, files))
    repeated = [path for path in streams if streams.count(path) > 1]
    if repeated:
        name = f"standard input ({STDIN})" if repeated[0] == STDIN else f"the pipe {repeated[0]}"
        raise ValueError(f"--input names {name} twice; it can be read once")
    return files


def _is_file(path: str) -> bool:
    return os.path.isfile(path) or is_stream(path)


def total_size(files: list[str]) -> int | None:
    """Return the bytes of the files; None if one is standard input or a pipe."""
    if any(map(is_stream, files)):
        return None
    return sum(map(os.path.getsize, files))


def read_pieces(files: list[str], keys: list[str], longest_line: int = LONGEST_LINE_MB << 20) -> Iterator[Piece]:
    """Yield the text of all files in order, as pieces. keys: the columns to read from Parquet files.

    longest_line: in bytes; it bounds the memory, whatever a compressed file expands to. Raises ValueError for a longer
    line or a damaged file, ImportError for a missing package.
    """
    number = 0
    earlier_bytes = 0  # of the files before this one
    chunks: list[Chunk] = []
    for path in files:
        with _open_source(path, keys) as source:
            for chunk in _chunks(path, source.blocks, longest_line):
                chunks.append(chunk)
                if sum(len(chunk.text) for chunk in chunks) >= min_piece_bytes(number):
                    position = source.position()
                    if position is not None:
                        position += earlier_bytes
                    yield Piece(number, chunks, position)
                    number += 1
                    chunks = []
        if not is_stream(path):
            earlier_bytes += os.path.getsize(path)
    if chunks:
        yield Piece(number, chunks, earlier_bytes)


def min_piece_bytes(number: int) -> int:
    """Return the size at which a piece ends: small at first, so that a small input also occupies several workers."""
    return min(_LARGEST_PIECE, _CHUNK_BYTES << min(number // _PIECES_A_SIZE, 20))


def _chunks(path: str, blocks: Iterator[bytes], longest_line: int) -> Iterator[Chunk]:
    """Cut the lines of a file into chunks. A chunk ends at the first line end past 256 KB."""
    buffer = bytearray()
    first_line = 1
    search_from = _CHUNK_BYTES - 1  # no line end before this one ends the chunk
    for block in blocks:
        buffer += block
        while (end := buffer.find(b"\n", search_from)) >= 0:
            text = bytes(buffer[: end + 1])
            del buffer[: end + 1]
            yield Chunk(path, first_line, text)
            first_line += text.count(b"\n")
            search_from = _CHUNK_BYTES - 1
        search_from = max(search_from, len(buffer))
        if search_from > longest_line:
            line = first_line + buffer.count(b"\n")
            raise ValueError(
                f"{path}:{line}: a line of more than {longest_line >> 20} MB (--max-line-mb); is it JSON lines? To allow such a "
                "document, raise the limit, if there is memory for a hundred times as much"
            )
    if buffer:
        yield Chunk(path, first_line, bytes(buffer))


@contextlib.contextmanager
def _open_source(path: str, keys: list[str]) -> Iterator[Source]:
    """Open a file of any kind, by its ending."""
    if path == STDIN:
        with waiting_for_text(path):
            first = sys.stdin.buffer.read1(_CHUNK_BYTES)
        yield Source(itertools.chain([first], _read_blocks(sys.stdin.buffer)), lambda: None)
        return
    with waiting_for_text(path):
        file = open(path, "rb")  # noqa: SIM115  closed below
    with file:
        if path.endswith(".parquet"):
            yield _parquet(path, file, keys)
        else:
            decompress = {".gz": _gzip_blocks, ".zst": _zstd_blocks}.get(Path(path).suffix)
            blocks = _read_blocks(file) if decompress is None else decompress(path, file)
            position = (lambda: None) if is_stream(path) else file.tell
            yield Source(blocks, position)


def _read_blocks(file: BinaryIO) -> Iterator[bytes]:
    return iter(functools.partial(file.read, _CHUNK_BYTES), b"")


def _gzip_blocks(path: str, file: BinaryIO) -> Iterator[bytes]:
    try:
        with gzip.GzipFile(fileobj=file) as text:
            yield from _read_blocks(text)
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise ValueError(f"{path} is damaged or incomplete: {error}; copy it again") from None


def _zstd_blocks(path: str, file: BinaryIO) -> Iterator[bytes]:
    """Decompress a file frame by frame, since the library's own reader does not notice a truncated file."""
    zstandard = optional_package("zstandard", path)
    frame = None  # the decompressor of the open frame
    try:
        for block in iter(functools.partial(file.read, _ZSTD_BYTES), b""):
            while block:
                frame = frame or zstandard.ZstdDecompressor(max_window_size=1 << 31).decompressobj()
                yield frame.decompress(block)
                if frame.eof:
                    block = frame.unused_data  # the start of the next frame
                    frame = None
                else:
                    block = b""
    except zstandard.ZstdError as error:
        raise ValueError(f"{path} is damaged: {error}; copy it again") from None
    if frame is not None:
        raise ValueError(f"{path} is incomplete: it ends within a frame; copy it again")


def _parquet(path: str, file: BinaryIO, keys: list[str]) -> Source:
    """Convert the rows to JSON lines, which all later code reads. Line n is row n."""
    pyarrow = optional_package("pyarrow", path)
    parquet = optional_package("pyarrow.parquet", path)
    try:
        table = parquet.ParquetFile(file)
    except (pyarrow.ArrowException, OSError) as error:
        raise ValueError(f"{path} is not a Parquet file, or is damaged: {error}") from None
    names = table.schema_arrow.names
    missing = [key for key in keys if key not in names]
    if missing:
        raise ValueError(f"{path} has no column {missing[0]!r}; it has {', '.join(map(repr, names))}; see --json-keys")
    rows = 0

    def blocks() -> Iterator[bytes]:
        nonlocal rows
        try:
            # Group by group: iterating over all at once, pyarrow would keep memory of all groups.
            for group in range(table.num_row_groups):
                for batch in table.iter_batches(_PARQUET_ROWS, [group], keys):
                    rows += batch.num_rows
                    lines = [json.dumps(row, default=_as_null).encode() + b"\n" for row in batch.to_pylist()]
                    yield b"".join(lines)
        except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
            raise ValueError(f"{path} is damaged near row {rows + 1}: {error}; copy it again") from None

    file_bytes = os.path.getsize(path)
    total_rows = max(table.metadata.num_rows, 1)
    return Source(blocks(), lambda: file_bytes * rows // total_rows)


def _as_null(value: Any) -> None:
    """Replace a value that JSON cannot hold, such as bytes, by null, which is then reported as no string."""
