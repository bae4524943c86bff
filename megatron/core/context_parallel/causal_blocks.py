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

ChunkNumbers = tuple[int, ...]  # ascending numbers of chunks, as a rank holds them


class ScoreBlock(NamedTuple):
    """Rows that meet keys. causal: they are the same positions, so that a row sees the keys up to its own; else all."""

    rows: slice
    keys: slice
    causal: bool


def blocks_between(mine: ChunkNumbers, theirs: ChunkNumbers, size: int) -> list[ScoreBlock]:
    """As few blocks as hold each visible pair of my row and their key once, and hidden pairs only where they are causal.

    size: rows of a chunk."""
    rows = len(mine) * size
    if mine == theirs:
        return [ScoreBlock(slice(0, rows), slice(0, rows), True)]
    found: list[ScoreBlock] = []
    for place, chunk in enumerate(theirs):
        keys, first = slice(place * size, (place + 1) * size), bisect_right(mine, chunk)
        later = slice(first * size, rows)
        if found and found[-1][:2] == (later, slice(found[-1].keys.start, keys.start)):
            found[-1] = ScoreBlock(later, slice(found[-1].keys.start, keys.stop), False)
        elif first < len(mine):
            found.append(ScoreBlock(later, keys, False))
    same = [chunk for chunk in mine if chunk in theirs]
    diagonals = [(_part(mine.index(chunk), size), _part(theirs.index(chunk), size)) for chunk in same]
    return found + [ScoreBlock(*parts, True) for parts in diagonals]


class ScoreTile(NamedTuple):
    """Scores of some of my rows and of the keys at hand; in the sample they begin at `first_row` and `first_key`."""

    rows: slice
    keys: slice
    first_row: int
    first_key: int


def tiles_between(
    mine: ChunkNumbers,
    theirs: ChunkNumbers,
    size: int,
    *,
    queries: int,
    keys: int,
    before: int | None,
    is_causal: bool = True,
    key_size: int | None = None,
) -> Iterator[ScoreTile]:
    """All visible pairs in tiles of at most `queries` x `keys` scores; those at the edges hold hidden pairs too.

    before: how many keys a row sees before its own; None: all. key_size: keys of a chunk, of a sequence of another
    length; None:
    as many as rows."""
    key_size = size if key_size is None else key_size
    for at, row_chunk in enumerate(mine):
        for start in range(0, size, queries):
            first, count = row_chunk * size + start, min(queries, size - start)
            for place, key_chunk in enumerate(theirs):
                begin = key_chunk * key_size
                low = begin if before is None else max(begin, first - before)
                high = min(begin + key_size, first + count) if is_causal else begin + key_size
                for key in range(low, high, keys):
                    here = place * key_size + key - begin
                    rows = slice(at * size + start, at * size + start + count)
                    yield ScoreTile(rows, slice(here, here + min(keys, high - key)), first, key)


def _part(place: int, size: int) -> slice:
    return slice(place * size, (place + 1) * size)
