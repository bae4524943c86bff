"""Pieces of a tensor as axis-aligned boxes, so that what one layout holds can be put into any other. Pure integers."""

from math import prod

Box = tuple[tuple[int, int], ...]  # one (start, stop) per dimension


def whole(shape: tuple[int, ...]) -> Box:
    return tuple((0, size) for size in shape)


def intersect(a: Box, b: Box) -> Box | None:
    """What two boxes share, None when that is nothing."""
    box = tuple((max(s, t), min(e, f)) for (s, e), (t, f) in zip(a, b, strict=True))
    return box if all(start < stop for start, stop in box) else None


def relative_to(box: Box, origin: Box) -> Box:
    """`box` in coordinates that start at the first corner of `origin`."""
    return tuple((start - zero, stop - zero) for (start, stop), (zero, _) in zip(box, origin, strict=True))


def slices(box: Box) -> tuple[slice, ...]:
    return tuple(slice(start, stop) for start, stop in box)


def flat_run(box: Box, shape: tuple[int, ...]) -> tuple[int, int]:
    """The elements (start, stop), in row-major order, of a box of whole rows of a tensor of `shape`."""
    assert box[1:] == whole(shape)[1:], f"box {box} of a tensor of shape {shape} is no run of whole rows"
    row = prod(shape[1:])
    return (box[0][0] * row, box[0][1] * row) if box else (0, 1)


def size_of(box: Box) -> tuple[int, ...]:
    return tuple(stop - start for start, stop in box)
