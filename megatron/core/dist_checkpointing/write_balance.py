"""Write balance: ranks that hold copies of the same tensors each write an equal part of the bytes.

two ranks with copies of a (4 rows), b (1 row), c (5 rows), all rows of one size

a a a a b | c c c c c        rank 0 writes a and b, rank 1 writes c; a tensor is cut between two rows only
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from math import prod

from megatron.core.dist_checkpointing.local_tensor import LocalTensor
from megatron.core.sharding.boxes import Box, size_of


def balance_writes(tensors: dict[str, LocalTensor]) -> dict[str, LocalTensor]:
    """Return `tensors` with only the pieces that this rank writes, wherever several `replicas` could write them.

    The result depends on the tensors alone. Ranks that hold copies must list their common tensors in the same order.
    tensors: name -> this rank's part, as `LocalTensor` has it. Their elements stay where they are.
    """
    # bytes that each group of replicas holds
    total_bytes: Counter[tuple[int, ...]] = Counter()
    for local in tensors.values():
        total_bytes[local.replicas.ranks] += _nbytes(local)

    # position p of n replicas writes bytes total * p // n to total * (p + 1) // n of the group's tensors, end to end
    bytes_before: Counter[tuple[int, ...]] = Counter()
    result = {}
    for name, local in tensors.items():
        replicas = local.replicas
        group = replicas.ranks
        result[name] = local
        if replicas.size > 1 and _nbytes(local):
            first = total_bytes[group] * replicas.rank // replicas.size - bytes_before[group]
            last = total_bytes[group] * (replicas.rank + 1) // replicas.size - bytes_before[group]
            pieces = list(_rows_between(local, first, last))
            result[name] = replace(local, pieces=pieces, is_writer=bool(pieces))
        bytes_before[group] += _nbytes(local)
    return result


def _nbytes(local: LocalTensor) -> int:
    return sum(prod(size_of(box)) for box, _ in local.pieces) * local.tensor.dtype.itemsize


def _rows_between(local: LocalTensor, first: int, last: int) -> Iterator[tuple[Box, Box]]:
    """Yield the rows of the pieces that begin at bytes first:last, counted over the pieces in their order."""
    offset = 0  # bytes of the pieces so far
    for global_box, local_box in local.pieces:
        rows = size_of(global_box)[0] if global_box else 1
        row_elements = prod(size_of(global_box)) // rows
        row_bytes = row_elements * local.tensor.dtype.itemsize
        # the first row that begins at or after a byte: rounded up, within this piece
        start, stop = (min(max(-(-(edge - offset) // row_bytes), 0), rows) for edge in (first, last))
        offset += rows * row_bytes
        if (start, stop) == (0, rows):
            yield global_box, local_box
        elif start < stop:
            # A local box has the dimensions of the global one, or is a flat run of its elements.
            has_rows = len(local_box) == len(global_box) != 1
            step = 1 if has_rows else row_elements
            yield _cut_rows(global_box, start, stop), _cut_rows(local_box, start * step, stop * step)


def _cut_rows(box: Box, start: int, stop: int) -> Box:
    begin = box[0][0]
    return ((begin + start, begin + stop), *box[1:])
