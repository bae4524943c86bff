"""How tensors of others lie in one of ours: pure rearrangements, each the same list of places for both directions. No torch.

    places(heads, theirs) -> (box of ours, view of one of theirs that holds the same elements), ...
    shapes(heads, ours)   -> the shapes of theirs, for writing

Reading copies each view into its box, writing each box into its view, so the way back is exact to the bit. To add an
operation:
two functions and a line.
"""

from collections.abc import Callable, Iterator
from itertools import accumulate, pairwise
from math import prod
from typing import NamedTuple

from megatron.core.sharding.boxes import Box, contiguous_flat_range, whole

Shape = tuple[int, ...]


class View(NamedTuple):
    """Elements of one of their tensors: from the element number `start` on, with a stride in elements for each dimension."""

    which: int  # of their tensors
    shape: Shape
    strides: Shape
    start: int = 0

    @classmethod
    def of(cls, which: int, shape: Shape) -> "View":
        """A whole tensor, row-major."""
        return cls(which, shape, tuple(prod(shape[dim + 1 :]) for dim in range(len(shape))))

    def transposed(self) -> "View":
        return self._replace(shape=self.shape[::-1], strides=self.strides[::-1])

    def rows(self, start: int, stop: int) -> "View":
        return self._replace(shape=(stop - start, *self.shape[1:]), start=self.start + start * self.strides[0])

    def parts(self, sizes: tuple[int, ...]) -> list["View"]:
        """Cut along the first dimension. Raises ValueError if `sizes` do not fill it."""
        if sum(sizes) != self.shape[0]:
            raise ValueError(f"a tensor of shape {self.shape} is no {' + '.join(map(str, sizes))} rows")
        return [self.rows(start, stop) for start, stop in pairwise(accumulate(sizes, initial=0))]


class HeadCounts(NamedTuple):
    """The heads of a model's attention."""

    queries: int
    groups: int  # key/value heads
    width: int

    @property
    def rows(self) -> tuple[int, int, int]:
        """Rows of all queries, keys and values."""
        return self.queries * self.width, self.groups * self.width, self.groups * self.width


Places = Iterator[tuple[Box, View]]


class Operation(NamedTuple):
    places: Callable[[HeadCounts, list[View]], Places]
    shapes: Callable[[HeadCounts, Shape], list[Shape]]


def _stacked(heads: HeadCounts, theirs: list[View]) -> Places:
    """One below the other: gate over up."""
    at = 0
    for x in theirs:
        rows, *others = x.shape or (1,)
        box = ((at, at + rows), *whole(tuple(others)))
        yield (box if x.shape else ()), x
        at += rows


def _transposed(heads: HeadCounts, theirs: list[View]) -> Places:
    return _stacked(heads, [x.transposed() for x in theirs])


def _qkv(heads: HeadCounts, theirs: list[View]) -> Places:
    """Ours has, for each group, its query heads, its key head, its value head."""
    g = heads.groups
    parts = [x.parts((rows // g,) * g) for x, rows in zip(theirs, heads.rows)]
    return _stacked(heads, [x for group in zip(*parts) for x in group])


def _qkv_pairs(heads: HeadCounts, theirs: list[View]) -> Places:
    """As `_qkv`, from queries and keys whose neighbouring rows rotate together: ours are the even rows, then the odd
    ones."""
    g, d = heads.groups, heads.width
    parts = [x.parts((rows // g,) * g) for x, rows in zip(theirs, heads.rows)]
    found = []
    for queries, key, value in zip(*parts):
        for head in (*queries.parts((d,) * (queries.shape[0] // d)), key):
            strides = (2 * head.strides[0], *head.strides[1:])
            for start in (head.start, head.start + head.strides[0]):
                found.append(head._replace(shape=(d // 2, *head.shape[1:]), strides=strides, start=start))
        found.append(value)
    return _stacked(heads, found)


def _qkv_rows(heads: HeadCounts, theirs: list[View]) -> Places:
    """Theirs has all queries, all keys, all values."""
    return _qkv(heads, theirs[0].parts(heads.rows))


def _qkv_transposed(heads: HeadCounts, theirs: list[View]) -> Places:
    return _qkv_rows(heads, [x.transposed() for x in theirs])


def _kv(heads: HeadCounts, theirs: list[View]) -> Places:
    """Ours has, for each head, its key rows, its value rows."""
    g = heads.groups
    parts = [x.parts((rows // g,) * g) for x, rows in zip(theirs, heads.rows[1:])]
    return _stacked(heads, [x for head in zip(*parts) for x in head])


def _flat(heads: HeadCounts, theirs: list[View]) -> Places:
    """Ours has no dimension of heads."""
    for x in theirs:
        yield whole((prod(x.shape),)), x._replace(shape=(prod(x.shape),), strides=(1,))


def _same(heads: HeadCounts, ours: Shape) -> list[Shape]:
    return [ours]


def _reversed(heads: HeadCounts, ours: Shape) -> list[Shape]:
    return [ours[::-1]]


OPERATIONS = {
    "copy": Operation(_stacked, _same),
    "transpose": Operation(_transposed, _reversed),  # GPT-2's Conv1D has [in, out]
    "flat": Operation(_flat, lambda heads, ours: [(ours[0] // heads.width, heads.width)]),
    "gate_up": Operation(_stacked, lambda heads, ours: [(ours[0] // 2, *ours[1:])] * 2),
    "kv": Operation(_kv, lambda heads, ours: [(ours[0] // 2, *ours[1:])] * 2),
    "qkv": Operation(_qkv, lambda heads, ours: [(rows, *ours[1:]) for rows in heads.rows]),
    "qkv_pairs": Operation(_qkv_pairs, lambda heads, ours: [(rows, *ours[1:]) for rows in heads.rows]),
    "qkv_rows": Operation(_qkv_rows, _same),
    "qkv_transpose": Operation(_qkv_transposed, _reversed),
}


class Stretch(NamedTuple):
    """Elements of ours, in row-major order, and where they begin in theirs, laid end to end."""

    start: int
    stop: int
    to: int


def stretches_of(operation: str, heads: HeadCounts, ours: Shape) -> list[Stretch] | None:
    """Where each stretch of ours lies in theirs; None if an operation takes neighbours apart, as a transposition does."""
    shapes = OPERATIONS[operation].shapes(heads, ours)
    begins = list(accumulate(map(prod, shapes), initial=0))
    found = []
    for box, view in OPERATIONS[operation].places(heads, [View.of(which, shape) for which, shape in enumerate(shapes)]):
        if (run := contiguous_flat_range(box, ours)) is None or view.strides != View.of(0, view.shape).strides:
            return None
        found.append(Stretch(*run, begins[view.which] + view.start))
    return found


def shape_of(boxes: list[Box]) -> Shape:
    """The shape of the tensor that these boxes cover. Raises ValueError if their sizes do not fit together."""
    if len({len(box) for box in boxes}) != 1:
        raise ValueError("tensors of different dimensions are one of ours")
    shape = tuple(max(stop for _, stop in spans) for spans in zip(*boxes))
    if (held := sum(prod(stop - start for start, stop in box) for box in boxes)) != prod(shape):
        raise ValueError(f"parts with {held} elements for a tensor of shape {shape}")
    return shape
