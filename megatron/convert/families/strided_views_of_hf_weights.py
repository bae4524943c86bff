"""Map each weight of ours to the Hugging Face tensors that hold its elements, for reading and for writing. No torch.

Every operation is a pure rearrangement. It is described by one list of places, which serves both directions:

    places(heads, hf_views) -> (box of our tensor, view of a Hugging Face tensor with the same elements), ...
    shapes(heads, ours)     -> the shapes of the Hugging Face tensors, for writing

Reading copies each view into its box, writing copies each box into its view, so a round trip is exact to the bit. To
add an operation, write these two functions and add a line to `OPERATIONS`.
"""

from collections.abc import Callable, Iterator
from itertools import accumulate, pairwise
from math import prod
from typing import NamedTuple

from megatron.core.sharding.boxes import Box, contiguous_flat_range, whole

Shape = tuple[int, ...]


class View(NamedTuple):
    """A strided view of one Hugging Face tensor, as `Tensor.as_strided` has it; all numbers count elements."""

    tensor_index: int  # which of the operation's Hugging Face tensors
    shape: Shape
    strides: Shape
    start: int = 0

    @classmethod
    def of(cls, tensor_index: int, shape: Shape) -> "View":
        """Return the view of a full row-major tensor."""
        return cls(tensor_index, shape, tuple(prod(shape[dim + 1 :]) for dim in range(len(shape))))

    def transposed(self) -> "View":
        return self._replace(shape=self.shape[::-1], strides=self.strides[::-1])

    def rows(self, start: int, stop: int) -> "View":
        """Return rows `start` to `stop` (exclusive) of the first dimension."""
        return self._replace(shape=(stop - start, *self.shape[1:]), start=self.start + start * self.strides[0])

    def parts(self, sizes: tuple[int, ...]) -> list["View"]:
        """Split along the first dimension, as `torch.split`. Raises ValueError if `sizes` do not add up to it."""
        if sum(sizes) != self.shape[0]:
            raise ValueError(f"a tensor of shape {self.shape} cannot be split into {' + '.join(map(str, sizes))} rows")
        return [self.rows(start, stop) for start, stop in pairwise(accumulate(sizes, initial=0))]


class HeadCounts(NamedTuple):
    """Sizes of a model's attention heads."""

    queries: int  # query heads
    groups: int  # key/value heads
    width: int  # features of a head

    @property
    def rows(self) -> tuple[int, int, int]:
        """Rows of the query, the key and the value weight."""
        return self.queries * self.width, self.groups * self.width, self.groups * self.width


Places = Iterator[tuple[Box, View]]


class Operation(NamedTuple):
    """One rearrangement; the module's docstring explains both functions."""

    places: Callable[[HeadCounts, list[View]], Places]
    shapes: Callable[[HeadCounts, Shape], list[Shape]]


def _stacked(heads: HeadCounts, hf_views: list[View]) -> Places:
    """Concatenate along the first dimension, such as gate over up."""
    first_row = 0
    for view in hf_views:
        rows, *other_dims = view.shape or (1,)
        box = ((first_row, first_row + rows), *whole(tuple(other_dims)))
        yield (box if view.shape else ()), view
        first_row += rows


def _transposed(heads: HeadCounts, hf_views: list[View]) -> Places:
    return _stacked(heads, [view.transposed() for view in hf_views])


def _qkv(heads: HeadCounts, hf_views: list[View]) -> Places:
    """Interleave q, k, v by group.

    Megatron's linear_qkv has, for each group, its query heads, its key head, its value head.

    hf_views: q [queries x width, h], k and v [groups x width, h].
    """
    g = heads.groups
    parts = [view.parts((rows // g,) * g) for view, rows in zip(hf_views, heads.rows)]
    return _stacked(heads, [x for group in zip(*parts) for x in group])


def _qkv_pairs(heads: HeadCounts, hf_views: list[View]) -> Places:
    """Interleave as `_qkv`, from queries and keys whose neighbouring rows rotate as a pair.

    torchtitan and the original Llama have them so.

    Ours rotates the first half of a head against the second, so a head here has the even rows, then the odd rows.
    """
    g = heads.groups
    d = heads.width
    parts = [view.parts((rows // g,) * g) for view, rows in zip(hf_views, heads.rows)]
    reordered = []
    for queries, key, value in zip(*parts):
        query_heads = queries.parts((d,) * (queries.shape[0] // d))
        for head in (*query_heads, key):
            every_other_row = (2 * head.strides[0], *head.strides[1:])
            for start in (head.start, head.start + head.strides[0]):  # even rows, odd rows
                half = head._replace(shape=(d // 2, *head.shape[1:]), strides=every_other_row, start=start)
                reordered.append(half)
        reordered.append(value)
    return _stacked(heads, reordered)


def _qkv_rows(heads: HeadCounts, hf_views: list[View]) -> Places:
    """Interleave as `_qkv`, from one tensor with all queries, then all keys, then all values."""
    return _qkv(heads, hf_views[0].parts(heads.rows))


def _qkv_transposed(heads: HeadCounts, hf_views: list[View]) -> Places:
    return _qkv_rows(heads, [view.transposed() for view in hf_views])


def _kv(heads: HeadCounts, hf_views: list[View]) -> Places:
    """Interleave k and v by head.

    linear_kv of cross attention has, for each head, its key rows, then its value rows.
    """
    g = heads.groups
    parts = [view.parts((rows // g,) * g) for view, rows in zip(hf_views, heads.rows[1:])]
    return _stacked(heads, [x for head in zip(*parts) for x in head])


def _flat(heads: HeadCounts, hf_views: list[View]) -> Places:
    """Flatten [heads, width] to one dimension."""
    for view in hf_views:
        numel = prod(view.shape)
        yield whole((numel,)), view._replace(shape=(numel,), strides=(1,))


def _experts_gate_up(heads: HeadCounts, hf_views: list[View]) -> Places:
    """Stack the experts' gates and ups, [f, h] each, to [experts, 2, f, h]. hf_views: gate 0, up 0, gate 1, ..."""
    for i, view in enumerate(hf_views):
        expert, part = divmod(i, 2)
        box = ((expert, expert + 1), (part, part + 1), *whole(view.shape))
        numel = prod(view.shape)
        yield box, view._replace(shape=(1, 1, *view.shape), strides=(numel, numel, *view.strides))


def _experts_down(heads: HeadCounts, hf_views: list[View]) -> Places:
    """Stack the experts' matrices, [h, f] each, to [experts, h, f]."""
    for expert, view in enumerate(hf_views):
        box = ((expert, expert + 1), *whole(view.shape))
        yield box, view._replace(shape=(1, *view.shape), strides=(prod(view.shape), *view.strides))


def _stacked_gate_up(heads: HeadCounts, hf_views: list[View]) -> Places:
    """Read [experts, 2 f, h], whose rows are the gates, then the ups, as [experts, 2, f, h]."""
    for view in hf_views:
        experts, rows, h = _three_dims(view)
        shape = (experts, 2, rows // 2, h)
        per_expert, per_row, per_column = view.strides
        yield whole(shape), view._replace(shape=shape, strides=(per_expert, rows // 2 * per_row, per_row, per_column))


def _stacked_gate_up_in_turn(heads: HeadCounts, hf_views: list[View]) -> Places:
    """Read [experts, h, 2 f], whose columns are gate 0, up 0, gate 1, ..., as [experts, 2, f, h]."""
    for view in hf_views:
        experts, h, columns = _three_dims(view)
        shape = (experts, 2, columns // 2, h)
        per_expert, per_row, per_column = view.strides
        yield whole(shape), view._replace(shape=shape, strides=(per_expert, per_column, 2 * per_column, per_row))


def _stacked_gate_up_bias(heads: HeadCounts, hf_views: list[View]) -> Places:
    """Read [experts, 2 f], gate 0, up 0, gate 1, ..., as [experts, 2, f]."""
    for view in hf_views:
        if len(view.shape) != 2:
            raise ValueError(f"a tensor of shape {view.shape} has no row for each expert")
        experts, columns = view.shape
        shape = (experts, 2, columns // 2)
        yield whole(shape), view._replace(shape=shape, strides=(view.strides[0], 1, 2))


def _stacked_transpose(heads: HeadCounts, hf_views: list[View]) -> Places:
    """Transpose the matrix of each expert: [experts, f, h] -> [experts, h, f]."""
    for view in hf_views:
        experts, f, h = _three_dims(view)
        per_expert, per_row, per_column = view.strides
        shape = (experts, h, f)
        yield whole(shape), view._replace(shape=shape, strides=(per_expert, per_column, per_row))


def _three_dims(view: View) -> tuple[int, int, int]:
    if len(view.shape) != 3:
        raise ValueError(f"a tensor of shape {view.shape} has no matrix for each expert")
    return view.shape[0], view.shape[1], view.shape[2]


def _same_shape(heads: HeadCounts, ours: Shape) -> list[Shape]:
    return [ours]


def _reversed_shape(heads: HeadCounts, ours: Shape) -> list[Shape]:
    return [ours[::-1]]


OPERATIONS = {
    "copy": Operation(_stacked, _same_shape),
    "transpose": Operation(_transposed, _reversed_shape),  # GPT-2's Conv1D has [in, out]
    "flat": Operation(_flat, lambda heads, ours: [(ours[0] // heads.width, heads.width)]),
    "gate_up": Operation(_stacked, lambda heads, ours: [(ours[0] // 2, *ours[1:])] * 2),
    "experts_gate_up": Operation(_experts_gate_up, lambda heads, ours: [ours[2:]] * (2 * ours[0])),
    "experts_down": Operation(_experts_down, lambda heads, ours: [ours[1:]] * ours[0]),
    "stacked_gate_up": Operation(_stacked_gate_up, lambda heads, ours: [(ours[0], 2 * ours[2], ours[3])]),
    "stacked_gate_up_in_turn": Operation(
        _stacked_gate_up_in_turn, lambda heads, ours: [(ours[0], ours[3], 2 * ours[2])]
    ),
    "stacked_gate_up_bias": Operation(_stacked_gate_up_bias, lambda heads, ours: [(ours[0], 2 * ours[2])]),
    "stacked_transpose": Operation(_stacked_transpose, lambda heads, ours: [(ours[0], ours[2], ours[1])]),
    "kv": Operation(_kv, lambda heads, ours: [(ours[0] // 2, *ours[1:])] * 2),
    "qkv": Operation(_qkv, lambda heads, ours: [(rows, *ours[1:]) for rows in heads.rows]),
    "qkv_pairs": Operation(_qkv_pairs, lambda heads, ours: [(rows, *ours[1:]) for rows in heads.rows]),
    "qkv_rows": Operation(_qkv_rows, _same_shape),
    "qkv_transpose": Operation(_qkv_transposed, _reversed_shape),
}


class FlatCopyRange(NamedTuple):
    """A contiguous range of our tensor's elements, row-major, that is contiguous in the Hugging Face tensors too."""

    start: int
    stop: int
    hf_start: int  # where the range begins in the Hugging Face tensors, concatenated end to end


def contiguous_copy_ranges(operation: str, heads: HeadCounts, ours: Shape) -> list[FlatCopyRange] | None:
    """Return the contiguous ranges that an operation copies, for a tensor of ours of shape `ours`.

    None if the operation separates neighbouring elements, as a transposition does.
    """
    shapes = OPERATIONS[operation].shapes(heads, ours)
    first_elements = list(accumulate(map(prod, shapes), initial=0))
    views = [View.of(tensor_index, shape) for tensor_index, shape in enumerate(shapes)]
    ranges = []
    for box, view in OPERATIONS[operation].places(heads, views):
        run = contiguous_flat_range(box, ours)
        is_contiguous_view = view.strides == View.of(0, view.shape).strides
        if run is None or not is_contiguous_view:
            return None
        ranges.append(FlatCopyRange(*run, first_elements[view.tensor_index] + view.start))
    return ranges


def shape_of(boxes: list[Box]) -> Shape:
    """Return the shape of the tensor that these boxes cover. Raises ValueError if their sizes do not fit together."""
    if len({len(box) for box in boxes}) != 1:
        raise ValueError("tensors with different numbers of dimensions cannot be joined into one")
    shape = tuple(max(stop for _, stop in spans) for spans in zip(*boxes))
    numel = sum(prod(stop - start for start, stop in box) for box in boxes)
    if numel != prod(shape):
        raise ValueError(f"the parts have {numel} elements, which do not fill a tensor of shape {shape}")
    return shape
