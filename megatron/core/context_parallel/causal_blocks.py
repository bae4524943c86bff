"""Blocks of attention's scores under a causal mask: which rows of this rank see which keys. Pure integers.

Ring of c = 4, keys of rank j in step i = rank - j ("a" the first, "b" the second chunk of a rank):

            step 0          step 1             step 2             step 3
    rank 0  all x 0 causal  b x all of 3       b x all of 2       b x all of 1
    rank 1  all x 1 causal  all x a of 0       b x all of 3       b x all of 2
    rank 2  all x 2 causal  all x a of 1       all x a of 0       b x all of 3
    rank 3  all x 3 causal  all x a of 2       all x a of 1       all x a of 0

All blocks after the first have the same work on every rank, in every step.
"""

from bisect import bisect_right
from collections.abc import Iterator
from typing import NamedTuple

ChunkNumbers = tuple[int, ...]  # ascending numbers of chunks of the sample, in the order in which a rank has them


class ScoreBlock(NamedTuple):
    """Rows that meet keys. causal: they are the same positions, so that a row sees the keys up to its own; else all."""

    rows: slice
    keys: slice
    causal: bool


def blocks_between(row_chunks: ChunkNumbers, key_chunks: ChunkNumbers, size: int) -> list[ScoreBlock]:
    """Return the fewest blocks that have each visible pair of a row and a key once.

    Blocks have hidden pairs only where they are causal.

    size: rows of a chunk. Slices are of the rows of `row_chunks`, and of the keys of `key_chunks`, side by side.
    """
    rows = len(row_chunks) * size
    if row_chunks == key_chunks:
        return [ScoreBlock(slice(0, rows), slice(0, rows), True)]

    # A chunk of keys is seen by all rows of later chunks. Neighbouring chunks with the same rows become one block.
    blocks: list[ScoreBlock] = []
    for place, key_chunk in enumerate(key_chunks):
        keys = _rows_of_chunk(place, size)
        first_later = bisect_right(row_chunks, key_chunk)
        later_rows = slice(first_later * size, rows)
        last = blocks[-1] if blocks else None
        if last is not None and last.rows == later_rows and last.keys.stop == keys.start:
            blocks[-1] = ScoreBlock(later_rows, slice(last.keys.start, keys.stop), False)
        elif first_later < len(row_chunks):
            blocks.append(ScoreBlock(later_rows, keys, False))

    # The same chunk as rows and keys: causal.
    for chunk in row_chunks:
        if chunk in key_chunks:
            rows_of_chunk = _rows_of_chunk(row_chunks.index(chunk), size)
            keys_of_chunk = _rows_of_chunk(key_chunks.index(chunk), size)
            blocks.append(ScoreBlock(rows_of_chunk, keys_of_chunk, True))
    return blocks


class ScoreTile(NamedTuple):
    """Scores of some rows of this rank and some keys at hand. In the sample they begin at `first_row`, `first_key`."""

    rows: slice
    keys: slice
    first_row: int
    first_key: int


def tiles_between(
    row_chunks: ChunkNumbers,
    key_chunks: ChunkNumbers,
    size: int,
    *,
    queries: int,
    keys: int,
    window_left: int | None,
    is_causal: bool = True,
    key_size: int | None = None,
) -> Iterator[ScoreTile]:
    """Yield all visible pairs in tiles of at most `queries` x `keys` scores; those at the edges have hidden pairs too.

    size: rows of a chunk. window_left: how many keys a row sees before its own; None: all. key_size: keys of a chunk of
    a sequence of another length; None: as many as rows.
    """
    key_size = size if key_size is None else key_size
    for row_place, row_chunk in enumerate(row_chunks):
        for start in range(0, size, queries):
            count = min(queries, size - start)
            rows = slice(row_place * size + start, row_place * size + start + count)
            first_row = row_chunk * size + start  # in the sample
            for key_place, key_chunk in enumerate(key_chunks):
                # the chunk's keys that some of the rows see, as positions in the sample
                chunk_start = key_chunk * key_size
                low = chunk_start
                high = chunk_start + key_size
                if window_left is not None:
                    low = max(low, first_row - window_left)
                if is_causal:
                    high = min(high, first_row + count)
                for first_key in range(low, high, keys):
                    local_key = key_place * key_size + first_key - chunk_start
                    yield ScoreTile(
                        rows, slice(local_key, local_key + min(keys, high - first_key)), first_row, first_key
                    )


def _rows_of_chunk(place: int, size: int) -> slice:
    return slice(place * size, (place + 1) * size)
