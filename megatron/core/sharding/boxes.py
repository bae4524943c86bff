"""Boxes: index ranges of a tensor, one per dimension. Intersecting boxes reshards a tensor between layouts. Pure
integers."""

from collections.abc import Iterable, Iterator
from math import prod

Box = tuple[tuple[int, int], ...]  # one (start, stop) per dimension


def whole(shape: tuple[int, ...]) -> Box:
    return tuple((0, size) for size in shape)


def intersect(a: Box, b: Box) -> Box | None:
    """The intersection of two boxes; None if it is empty."""
    box = tuple((max(s, t), min(e, f)) for (s, e), (t, f) in zip(a, b, strict=True))
    return box if all(start < stop for start, stop in box) else None


def relative_to(box: Box, origin: Box) -> Box:
    """`box` in coordinates relative to the first corner of `origin`."""
    return tuple((start - zero, stop - zero) for (start, stop), (zero, _) in zip(box, origin, strict=True))


def is_within(box: Box, shape: tuple[int, ...]) -> bool:
    """Whether the box is not empty and lies in a tensor of `shape`."""
    return len(box) == len(shape) and all(0 <= start < stop <= size for (start, stop), size in zip(box, shape))


def slices(box: Box) -> tuple[slice, ...]:
    return tuple(slice(start, stop) for start, stop in box)


def flat_run(box: Box, shape: tuple[int, ...]) -> tuple[int, int]:
    """The flat range (start, stop), in row-major order, of a box of whole rows of a tensor of `shape`."""
    assert box[1:] == whole(shape)[1:], f"box {box} does not cover whole rows of a tensor of shape {shape}"
    row = prod(shape[1:])
    return (box[0][0] * row, box[0][1] * row) if box else (0, 1)


def boxes_of_run(start: int, stop: int, shape: tuple[int, ...]) -> list[Box]:
    """The flat range start .. stop of a tensor of `shape`, in row-major order, as boxes, each contiguous in memory.

    For shape (3, 4), 2 .. 9 is [0:1, 2:4], [1:2, 0:4], [2:3, 0:1].
    """
    if start >= stop:
        return []
    if not shape:
        return [()]
    row = prod(shape[1:])
    first, last = -(-start // row), stop // row  # whole rows
    if first > last:  # the range lies within one row
        return [((last, first), *box) for box in boxes_of_run(start - last * row, stop - last * row, shape[1:])]
    head = boxes_of_run(start - (first - 1) * row, row, shape[1:]) if start < first * row else []
    tail = boxes_of_run(0, stop - last * row, shape[1:])
    middle = [((first, last), *whole(shape[1:]))] if first < last else []
    return [((first - 1, first), *box) for box in head] + middle + [((last, last + 1), *box) for box in tail]


def start_in_run(box: Box, shape: tuple[int, ...]) -> int:
    """The flat index, in row-major order, of the first element of a box in a tensor of `shape`."""
    at = 0
    for (start, _), size in zip(box, shape, strict=True):
        at = at * size + start
    return at


def run_of(box: Box, shape: tuple[int, ...]) -> tuple[int, int] | None:
    """The flat range (start, stop), in row-major order, of a box of a tensor of `shape`; None if its elements lie apart."""
    start = start_in_run(box, shape)
    stop = start + prod(size_of(box))
    return (start, stop) if boxes_of_run(start, stop, shape) == [box] else None


def pieces_of_run(
    pairs: Iterable[tuple[Box, Box]], run: tuple[int, int], shape: tuple[int, ...]
) -> Iterator[tuple[Box, Box]]:
    """The parts of `pairs` that lie in the flat range `run` of the local tensor, which has `shape`.

    pairs: (box in the global tensor, box in the local tensor). Yields (box in the global tensor, box in the flat run).
    """
    start, stop = run
    for box in boxes_of_run(start, stop, tuple(shape)):
        for whole_box, local in pairs:
            shared = intersect(box, local)
            if shared is not None:
                first = start_in_run(shared, tuple(shape)) - start
                inside = relative_to(shared, local)
                moved = tuple((a + zero, b + zero) for (a, b), (zero, _) in zip(inside, whole_box, strict=True))
                yield moved, ((first, first + prod(size_of(shared))),)


def size_of(box: Box) -> tuple[int, ...]:
    return tuple(stop - start for start, stop in box)
