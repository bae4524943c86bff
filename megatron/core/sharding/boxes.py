"""Boxes: index ranges of a tensor, one per dimension. Intersecting boxes reshards a tensor between layouts.

Pure integers. A flat range (start, stop) counts elements in row-major order.
"""

from collections.abc import Iterable, Iterator
from math import prod

Box = tuple[tuple[int, int], ...]  # one (start, stop) per dimension


def whole(shape: tuple[int, ...]) -> Box:
    """Return the box of the whole tensor."""
    return tuple((0, size) for size in shape)


def intersect(a: Box, b: Box) -> Box | None:
    """Return the intersection of two boxes; None if it is empty."""
    box = tuple(
        (max(a_start, b_start), min(a_stop, b_stop)) for (a_start, a_stop), (b_start, b_stop) in zip(a, b, strict=True)
    )
    if all(start < stop for start, stop in box):
        return box
    return None


def relative_to(box: Box, origin: Box) -> Box:
    """Return `box` in coordinates relative to the first corner of `origin`."""
    return tuple((start - zero, stop - zero) for (start, stop), (zero, _) in zip(box, origin, strict=True))


def is_within(box: Box, shape: tuple[int, ...]) -> bool:
    """Return whether the box is not empty and is inside a tensor of `shape`."""
    return len(box) == len(shape) and all(0 <= start < stop <= size for (start, stop), size in zip(box, shape))


def slices(box: Box) -> tuple[slice, ...]:
    """Return the index of the box: `tensor[slices(box)]`."""
    return tuple(slice(start, stop) for start, stop in box)


def size_of(box: Box) -> tuple[int, ...]:
    """Return the shape of the box."""
    return tuple(stop - start for start, stop in box)


def rows_to_flat_range(box: Box, shape: tuple[int, ...]) -> tuple[int, int]:
    """Return the flat range of a box of whole rows of a tensor of `shape`."""
    assert box[1:] == whole(shape)[1:], f"box {box} does not cover whole rows of a tensor of shape {shape}"
    if not box:  # a scalar
        return (0, 1)
    row = prod(shape[1:])
    start, stop = box[0]
    return (start * row, stop * row)


def flat_range_to_boxes(start: int, stop: int, shape: tuple[int, ...]) -> list[Box]:
    """Return the flat range start .. stop of a tensor of `shape` as boxes, each contiguous in memory.

    For shape (3, 4), 2 .. 9 is [0:1, 2:4], [1:2, 0:4], [2:3, 0:1]:

        row 0    .  .  2  3      the end of a row
        row 1    4  5  6  7      whole rows
        row 2    8  .  .  .      the start of a row
    """
    if start >= stop:
        return []
    if not shape:
        return [()]
    row = prod(shape[1:])
    first = -(-start // row)  # whole rows are first .. last
    last = stop // row
    if first > last:  # the range is within one row
        return [((last, first), *box) for box in flat_range_to_boxes(start - last * row, stop - last * row, shape[1:])]

    boxes: list[Box] = []
    if start < first * row:  # the end of the row before
        for box in flat_range_to_boxes(start - (first - 1) * row, row, shape[1:]):
            boxes.append(((first - 1, first), *box))
    if first < last:
        boxes.append(((first, last), *whole(shape[1:])))
    for box in flat_range_to_boxes(0, stop - last * row, shape[1:]):  # the start of the row after
        boxes.append(((last, last + 1), *box))
    return boxes


def flat_start(box: Box, shape: tuple[int, ...]) -> int:
    """Return the flat index of the first element of a box in a tensor of `shape`."""
    index = 0
    for (start, _), size in zip(box, shape, strict=True):
        index = index * size + start
    return index


def contiguous_flat_range(box: Box, shape: tuple[int, ...]) -> tuple[int, int] | None:
    """Return the flat range of a box of a tensor of `shape`; None if its elements are not contiguous."""
    start = flat_start(box, shape)
    stop = start + prod(size_of(box))
    if flat_range_to_boxes(start, stop, shape) != [box]:
        return None
    return (start, stop)


def pieces_in_flat_range(
    pairs: Iterable[tuple[Box, Box]], flat_range: tuple[int, int], shape: tuple[int, ...]
) -> Iterator[tuple[Box, Box]]:
    """Yield the parts of `pairs` in the flat range `flat_range` of the local tensor, which has `shape`.

    pairs: (box in the global tensor, box in the local tensor). Yields (box in the global tensor, box in the flat tensor
    of the range's elements).
    """
    start, stop = flat_range
    for box in flat_range_to_boxes(start, stop, tuple(shape)):
        for global_box, local_box in pairs:
            shared = intersect(box, local_box)
            if shared is None:
                continue
            first = flat_start(shared, tuple(shape)) - start
            inside = relative_to(shared, local_box)
            global_part = tuple(
                (zero + part_start, zero + part_stop)
                for (part_start, part_stop), (zero, _) in zip(inside, global_box, strict=True)
            )
            yield global_part, ((first, first + prod(size_of(shared))),)
