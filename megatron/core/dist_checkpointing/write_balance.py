"""Who writes what several ranks hold: each of them an equal part of the bytes.

two ranks with copies of a (4 rows), b (1 row), c (5 rows), all rows of one size

a a a a b | c c c c c        rank 0 writes a and b, rank 1 writes c; a cut within a tensor lies between two rows
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from math import prod

from megatron.core.dist_checkpointing.local_tensor import LocalTensor
from megatron.core.sharding.boxes import Box, size_of


def shares(tensors: dict[str, LocalTensor]) -> dict[str, LocalTensor]:
    """`tensors` with the pieces that this rank writes, where it is one of the `replicas` that could write them.

    The same for the same tensors, in any run. Ranks that hold copies must list their common tensors in the same order.
    """
    total: Counter[tuple[int, ...]] = Counter()
    for local in tensors.values():
        total[local.replicas.ranks] += _nbytes(local)
    at: Counter[tuple[int, ...]] = Counter()  # bytes of a group's tensors so far
    result = {}
    for name, local in tensors.items():
        replicas, group = local.replicas, local.replicas.ranks
        result[name] = local
        if replicas.size > 1 and _nbytes(local):
            edges = (total[group] * position // replicas.size for position in (replicas.rank, replicas.rank + 1))
            first, last = (edge - at[group] for edge in edges)
            pieces = list(_between(local, first, last))
            result[name] = replace(local, pieces=pieces, is_writer=bool(pieces))
        at[group] += _nbytes(local)
    return result


def _nbytes(local: LocalTensor) -> int:
    return sum(prod(size_of(box)) for box, _ in local.pieces) * local.tensor.dtype.itemsize


def _between(local: LocalTensor, first: int, last: int) -> Iterator[tuple[Box, Box]]:
    """The rows of the pieces that begin at the bytes first:last, in the order of the pieces."""
    at = 0
    for box, inner in local.pieces:
        rows = size_of(box)[0] if box else 1
        elements = prod(size_of(box)) // rows
        nbytes = elements * local.tensor.dtype.itemsize
        start, stop = (min(max(-(-(edge - at) // nbytes), 0), rows) for edge in (first, last))
        at += rows * nbytes
        if (start, stop) == (0, rows):
            yield box, inner
        elif start < stop:
            step = 1 if len(inner) == len(box) != 1 else elements  # else a flat run
            yield _rows(box, start, stop), _rows(inner, start * step, stop * step)


def _rows(box: Box, start: int, stop: int) -> Box:
    return ((box[0][0] + start, box[0][0] + stop), *box[1:])
