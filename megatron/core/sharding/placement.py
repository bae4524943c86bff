"""The placement of a parameter: how it is sharded and replicated. Initial values, gradient sums, norms and checkpoints
follow.

A layer sets `parameter.placement = Placement(...)` when it creates the parameter. No other code adds to this fact.

| question                    | answer                                                                            |
|-----------------------------|-----------------------------------------------------------------------------------|
| initial value               | `init`, drawn for the global tensor of `shape`; a rank keeps its `pieces`         |
| gradient buffer             | shared by parameters of equal (`reduce_over`, `partial_grad` over "embd", dtype)  |
| sums after the backward     | over `reduce_over`, and for `partial_grads` over each of their axes               |
| elements counted in a norm  | `owned_pieces`: each element has one owner                                        |
| boxes in a checkpoint       | a rank writes its `owned_pieces` and reads its `pieces`                           |
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from megatron.core.parallel.grid import DATA_PARALLEL, Axis
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


# A function gets the whole tensor on every rank, like those of `torch.nn.init`; `random._made_by` states the cost.
InitialValue = Normal | XavierUniform | Constant | Callable[[Any], Any]


@dataclass(frozen=True)
class Rows:
    """Rows start .. stop of the global tensor.

    shared_over: the axis whose ranks all hold these rows, each with a partial gradient.
    """

    start: int
    stop: int
    shared_over: str | None = None


@dataclass(frozen=True)
class Placement:
    """How one parameter is spread over the ranks. Axes are names; a mesh turns names into `Axis` objects."""

    shape: tuple[int, ...]  # of the global tensor, without padding
    init: InitialValue | None  # None: the creator fills it
    shard: Mapping[str, int] = field(default_factory=dict)  # axis -> the tensor dimension that it shards
    replicated_over: tuple[str, ...] = ()  # axes whose ranks hold equal copies and compute equal gradients
    partial_grad: tuple[str, ...] = ()  # axes whose ranks each compute a partial gradient
    reduce_over: tuple[str, ...] = DATA_PARALLEL  # the axes of its data-parallel replicas
    blocks: tuple[int, ...] = ()  # fused parts (gate|up) of the first dimension in `shard`; each is sharded by itself
    rows: tuple[Rows, ...] = ()  # this rank's rows of dimension 0, in order, if they are not an equal shard
    interleaved: tuple[
        int, ...
    ] = ()  # rows of each matrix in a group (q|k|v), where dimension 0 holds groups of fused matrices


def placement_of(tensor: Any) -> Placement | None:
    """The placement that the creator of a parameter has set, ours or a script; None: nobody has."""
    return getattr(tensor, "placement", None)


def is_counted(placement: Placement, mesh: Mapping[str, Axis]) -> bool:
    """Whether this rank owns the parameter among the ranks of equal copies. `owned_pieces` refines it for `rows`."""
    return all(mesh[name].is_first for name in placement.replicated_over)


def pieces(placement: Placement, local_shape: tuple[int, ...], mesh: Mapping[str, Axis]) -> list[tuple[Box, Box]]:
    """This rank's elements as pairs (box in the global tensor, box in the local tensor), one per fused block.

    Padding beyond `placement.shape` is in no box: a rank that holds only padding gets an empty list.
    """
    listed = [(((rows.start, rows.stop), *local[1:]), local) for rows, local in _listed(placement, local_shape)]
    pairs = listed or [(whole(local_shape), whole(local_shape))]
    fused = next(iter(placement.shard.values()), None)
    for dim in dict.fromkeys(placement.shard.values()):
        part, parts = _part_of([mesh[name] for name, divided in placement.shard.items() if divided == dim])
        blocks = placement.blocks if dim == fused else ()
        pairs = [pair for old in pairs for pair in _divide(old, dim, part, parts, blocks)]
    clipped = []
    for box, local in pairs:
        if (kept := intersect(box, whole(placement.shape))) is not None:
            inside = zip(local, relative_to(kept, box))
            clipped.append((kept, tuple((a + start, a + stop) for (a, _), (start, stop) in inside)))
    return clipped


def owned_pieces(placement: Placement, local_shape: tuple[int, ...], mesh: Mapping[str, Axis]) -> list[tuple[Box, Box]]:
    """The `pieces` that this rank owns: over one replica of the model, each element has one owner."""
    if not is_counted(placement, mesh):
        return []
    shared = [(mesh[rows.shared_over], box) for rows, box in _listed(placement, local_shape) if rows.shared_over]
    elsewhere = {box for axis, box in shared if not axis.is_first}
    return [pair for pair in pieces(placement, local_shape, mesh) if pair[1] not in elsewhere]


def shared_rows(placement: Placement, local_shape: tuple[int, ...]) -> list[tuple[str, Box]]:
    """(axis, box in the local tensor) of the rows that all ranks of an axis hold."""
    return [(rows.shared_over, local) for rows, local in _listed(placement, local_shape) if rows.shared_over]


def partial_axes(placement: Placement) -> set[str]:
    """The axes over which gradients of the parameter, or of some of its rows, are partial sums."""
    return {*placement.partial_grad, *(rows.shared_over for rows in placement.rows if rows.shared_over is not None)}


def partial_grads(placement: Placement, local_shape: tuple[int, ...], axis_name: str) -> list[Box]:
    """The boxes of the local tensor whose gradient is a partial sum over the axis."""
    if axis_name in placement.partial_grad:
        return [whole(local_shape)]
    return [local for rows, local in _listed(placement, local_shape) if rows.shared_over == axis_name]


def _listed(placement: Placement, local_shape: tuple[int, ...]) -> list[tuple[Rows, Box]]:
    """`placement.rows`, each with its box in the local tensor."""
    boxes, local_start = [], 0
    for rows in placement.rows:
        local_stop = local_start + rows.stop - rows.start
        boxes.append((rows, ((local_start, local_stop), *whole(local_shape)[1:])))
        local_start = local_stop
    assert not boxes or local_start == local_shape[0], f"{placement.rows} do not fill {local_shape[0]} local rows"
    return boxes


def _part_of(axes: list[Axis]) -> tuple[int, int]:
    """(index, number) of this rank's part of a dimension; the first axis divides the whole, the next divides each part."""
    part, parts = 0, 1
    for axis in axes:
        part, parts = part * axis.size + axis.rank, parts * axis.size
    return part, parts


def _divide(pair: tuple[Box, Box], dim: int, part: int, parts: int, blocks: tuple[int, ...]) -> list[tuple[Box, Box]]:
    """Part `part` of `parts` of a tensor along `dim`, block by block.

    Two blocks, two parts:  whole  [ g0 g1 | u0 u1 ]     part 0 is [ g0 u0 ], part 1 is [ g1 u1 ]
    """
    extent = pair[1][dim][1]
    result, local_start = [], 0
    for block in blocks or (extent * parts,):
        size = block // parts
        starts = local_start * parts + part * size, local_start  # in the global and in the local tensor
        result.append(tuple((*b[:dim], (at, at + size), *b[dim + 1 :]) for b, at in zip(pair, starts)))
        local_start += size
    assert local_start == extent, f"blocks {blocks} in {parts} parts do not fill a local extent of {extent}"
    return result
