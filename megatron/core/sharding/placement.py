"""The placement of a parameter: how it is sharded and replicated.

Initial values, gradient sums, norms and checkpoints follow from it. A layer sets `parameter.placement = Placement(...)`
when it creates the parameter. Nothing else says how it is sharded.

| question                    | answer                                                                            |
|-----------------------------|-----------------------------------------------------------------------------------|
| initial value               | `init`, drawn for the global tensor of `shape`; a rank takes its `pieces`         |
|                             | `init_per_matrix`: for each of the matrices that it stacks                        |
| gradient buffer             | shared by parameters of equal (`reduce_over`, `partial_grad` over "embd", dtype)  |
| sums after the backward     | over `reduce_over`, and for `partial_grads` over each of their axes               |
| elements counted in a norm  | `owned_pieces`: each element has one owner                                        |
| boxes in a checkpoint       | a rank writes its `owned_pieces` and reads its `pieces`                           |

A piece is a pair (box in the global tensor, box in the local tensor). `gate_up`, a fused weight [8, in] of gate and up,
is sharded over tp by `blocks=(4, 4)`, each block by itself:

    global rows    0  1  2  3 | 4  5  6  7         local rows of rank 0    0  1 | 2  3
                   g0 g0 g1 g1  u0 u0 u1 u1                                 g0 g0 u0 u0

    pieces on rank 0    ([0:2, :], [0:2, :])  and  ([4:6, :], [2:4, :])
    pieces on rank 1    ([2:4, :], [0:2, :])  and  ([6:8, :], [2:4, :])

A vocabulary of 5 words over two ranks has 3 rows on each; the last row of rank 1 is padding and in no piece:

    pieces on rank 0    ([0:3, :], [0:3, :])
    pieces on rank 1    ([3:5, :], [0:2, :])
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from megatron.core.parallel.rank_grid import DATA_PARALLEL, Axis
from megatron.core.sharding.boxes import Box, intersect, relative_to, whole


@dataclass(frozen=True)
class Normal:
    """Independent draws from N(0, std^2)."""

    std: float


@dataclass(frozen=True)
class XavierUniform:
    """Independent draws from U(-a, a), a = sqrt(6 / (rows + columns)) of the global matrix (Glorot and Bengio 2010)."""


@dataclass(frozen=True)
class Constant:
    """The same value everywhere."""

    value: float


# A function gets the whole tensor on every rank, like those of `torch.nn.init`; for its cost see
# `initial_values._call_init`.
InitialValue = Normal | XavierUniform | Constant | Callable[[Any], Any]


@dataclass(frozen=True)
class Rows:
    """Rows start .. stop of the global tensor.

    shared_over: the axis whose ranks all have these rows, each with a partial gradient.
    """

    start: int
    stop: int
    shared_over: str | None = None


@dataclass(frozen=True)
class Placement:
    """The sharding and replication of one parameter. Axes are names; a mesh turns names into `Axis` objects.

    shape: of the whole tensor, without padding. init: its initial value; None: the creator fills it.
    shard: axis -> the dimension that it shards. blocks: sizes of fused parts of that dimension, each sharded by itself.
    rows: this rank's rows of dimension 0 as `Rows`, if they are not an equal share. interleaved: rows of each matrix in a
    group (q, k, v), if dimension 0 consists of such groups. init_per_matrix: each stacked or fused matrix has the initial
    value of a tensor of its own.
    replicated_over: axes whose ranks have equal copies. partial_grad: axes whose ranks each compute a part of the gradient.
    reduce_over: the axes of the data-parallel replicas.
    """

    shape: tuple[int, ...]  # of the global tensor, without padding
    init: InitialValue | None  # None: the creator fills it
    shard: Mapping[str, int] = field(default_factory=dict)  # axis -> the tensor dimension that it shards
    replicated_over: tuple[str, ...] = ()  # axes whose ranks have equal copies and compute equal gradients
    partial_grad: tuple[str, ...] = ()  # axes whose ranks each compute a partial gradient
    reduce_over: tuple[str, ...] = DATA_PARALLEL  # the axes of its data-parallel replicas
    blocks: tuple[int, ...] = ()  # fused parts (gate|up) of the first dimension in `shard`; each is sharded by itself
    rows: tuple[Rows, ...] = ()  # this rank's rows of dimension 0, in order, if they are not an equal shard
    # rows of each matrix in a group (q|k|v), where dimension 0 consists of groups of fused matrices
    interleaved: tuple[int, ...] = ()
    # The tensor stacks matrices (`stacked_matrices_for_init.py`), and each has the initial value of a tensor of its own: by its
    # fans, where `init` follows them (Xavier, Kaiming). False: that of one whole tensor, as of Megatron's fused weights;
    # XavierUniform takes the last two dimensions for the matrix also then.
    init_per_matrix: bool = False


def placement_of(tensor: Any) -> Placement | None:
    """Return the placement that the creator of a parameter has set, ours or a script; None: nobody has."""
    return getattr(tensor, "placement", None)


def is_counted(placement: Placement, mesh: Mapping[str, Axis]) -> bool:
    """Return whether this rank owns the parameter among the ranks of equal copies. For `rows` see `owned_pieces`."""
    return all(mesh[name].is_first for name in placement.replicated_over)


def pieces(placement: Placement, local_shape: tuple[int, ...], mesh: Mapping[str, Axis]) -> list[tuple[Box, Box]]:
    """Return this rank's elements as pairs (box in the global tensor, box in the local tensor), one per fused block.

    The examples at the top of the file draw them. Padding beyond `placement.shape` is in no box: a rank that has only
    padding gets an empty list.
    """
    # begin with the local tensor as if it were global, or with the rows that are listed
    local = whole(local_shape)
    pairs = [(local, local)]
    if placement.rows:
        pairs = [(((rows.start, rows.stop), *box[1:]), box) for rows, box in _row_boxes(placement, local_shape)]

    # move the global boxes to this rank's part of each sharded dimension
    fused_dim = next(iter(placement.shard.values()), None)
    for dim in dict.fromkeys(placement.shard.values()):
        axes = [mesh[name] for name, sharded_dim in placement.shard.items() if sharded_dim == dim]
        part, num_parts = _part_of(axes)
        blocks = placement.blocks if dim == fused_dim else ()
        pairs = [piece for pair in pairs for piece in _take_part(pair, dim, part, num_parts, blocks)]

    # leave out padding
    result = []
    for global_box, local_box in pairs:
        inside = intersect(global_box, whole(placement.shape))
        if inside is not None:
            offset = relative_to(inside, global_box)
            local_inside = tuple((zero + start, zero + stop) for (zero, _), (start, stop) in zip(local_box, offset))
            result.append((inside, local_inside))
    return result


def owned_pieces(placement: Placement, local_shape: tuple[int, ...], mesh: Mapping[str, Axis]) -> list[tuple[Box, Box]]:
    """Return the `pieces` that this rank owns: over one replica of the model, each element has one owner."""
    if not is_counted(placement, mesh):
        return []
    shared = shared_rows(placement, local_shape)
    owned_elsewhere = {box for axis_name, box in shared if not mesh[axis_name].is_first}
    return [pair for pair in pieces(placement, local_shape, mesh) if pair[1] not in owned_elsewhere]


def shared_rows(placement: Placement, local_shape: tuple[int, ...]) -> list[tuple[str, Box]]:
    """Return (axis, box in the local tensor) of the rows that all ranks of an axis have."""
    return [(rows.shared_over, box) for rows, box in _row_boxes(placement, local_shape) if rows.shared_over]


def partial_axes(placement: Placement) -> set[str]:
    """Return the axes over which gradients of the parameter, or of some of its rows, are partial sums."""
    return {*placement.partial_grad, *(rows.shared_over for rows in placement.rows if rows.shared_over is not None)}


def partial_grads(placement: Placement, local_shape: tuple[int, ...], axis_name: str) -> list[Box]:
    """Return the boxes of the local tensor whose gradient is a partial sum over the axis."""
    if axis_name in placement.partial_grad:
        return [whole(local_shape)]
    return [box for rows, box in _row_boxes(placement, local_shape) if rows.shared_over == axis_name]


def _row_boxes(placement: Placement, local_shape: tuple[int, ...]) -> list[tuple[Rows, Box]]:
    """Return `placement.rows`, each with its box in the local tensor, where they follow one another."""
    boxes = []
    local_start = 0
    for rows in placement.rows:
        local_stop = local_start + rows.stop - rows.start
        boxes.append((rows, ((local_start, local_stop), *whole(local_shape)[1:])))
        local_start = local_stop
    assert not boxes or local_start == local_shape[0], f"{placement.rows} do not fill {local_shape[0]} local rows"
    return boxes


def _part_of(axes: list[Axis]) -> tuple[int, int]:
    """Return (index, number) of this rank's part of a dimension.

    The first axis divides the whole, the next divides each part.
    """
    part = 0
    num_parts = 1
    for axis in axes:
        part = part * axis.size + axis.rank
        num_parts *= axis.size
    return part, num_parts


def _take_part(
    pair: tuple[Box, Box], dim: int, part: int, num_parts: int, blocks: tuple[int, ...]
) -> list[tuple[Box, Box]]:
    """Return the pieces of part `part` of `num_parts` of a tensor along `dim`, block by block.

    The local box of `pair` is that part.

    Two blocks, two parts:  global [ g0 g1 | u0 u1 ]     part 0 is [ g0 u0 ], part 1 is [ g1 u1 ]
    """
    global_box, local_box = pair
    _, extent = local_box[dim]
    result = []
    local_start = 0
    for block in blocks or (extent * num_parts,):
        size = block // num_parts
        block_start = local_start * num_parts  # the blocks before fill as much of every part
        start = block_start + part * size
        result.append((_with_range(global_box, dim, start, size), _with_range(local_box, dim, local_start, size)))
        local_start += size
    assert local_start == extent, f"blocks {blocks} in {num_parts} parts do not fill a local extent of {extent}"
    return result


def _with_range(box: Box, dim: int, start: int, size: int) -> Box:
    """Return the box with start .. start + size along `dim`."""
    return (*box[:dim], (start, start + size), *box[dim + 1 :])
