"""Full matrices of parameters that are sharded over tensor-parallel ranks, for updates that need them.

    full = matrix.gather(momentum)        one all-gather over tp, or etp; all its ranks must call, in the parameters' order
    momentum_part = matrix.part(direction(full))

An update is written as for one process and gives the same numbers in every layout. Ranks of tp repeat each other's
computation. Of stacked experts [E, .., out, in] a rank updates those that it has, with whole matrices, gathered over
etp. Ranks that have the same parts (data-parallel ones at ZeRO stage 0) do, too, unless the update divides it:
`MatrixOwners.share`.
"""

import json
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache

import torch
from torch import Tensor, nn

from megatron.core.base.async_handle import AsyncHandle
from megatron.core.base.dataclass_flags import ConfigError
from megatron.core.optimizer.matrix_owners import owners_by_turn
from megatron.core.parallel import collectives
from megatron.core.parallel.mesh import Mesh
from megatron.core.parallel.rank_grid import ALONE, Axis
from megatron.core.sharding.boxes import Box, slices
from megatron.core.sharding.placement import Placement, pieces

Pieces = list[tuple[Box, Box]]  # (box in the full matrix, box in the local part)


_IN_FLIGHT = 2  # results in flight, which take memory: enough that one is sent while the next is computed


class MatrixOwners:
    """The ranks of `axis`, which have the same parts of some matrices: each computes the results of some, for all."""

    def __init__(self, axis: Axis = ALONE):
        self.axis = axis
        self._all_agree: bool | None = None

    def share(
        self,
        work: Sequence[int],
        compute: Callable[[int], Tensor],
        empty: Callable[[int], Tensor],
        use: Callable[[int, Tensor], None],
    ) -> None:
        """Call use(i, result) for every matrix i, of which one rank computes the result.

        Its owner alone calls compute(i); the others receive the result into empty(i), of the same shape and dtype,
        contiguous. Every rank of the axis must call, with equal work.

        One broadcast per matrix, in flight while the next results are computed. work: of each matrix, to divide it
        evenly.
        """
        in_flight: deque[tuple[int, AsyncHandle[Tensor]]] = deque()
        limit = min(_IN_FLIGHT, self.axis.size - 1)
        for turn in owners_by_turn(tuple(work), self.axis.size):
            # this rank computes the result of its own matrix of this turn, if it has one
            own_results = {i: compute(i) for i, rank in turn if rank == self.axis.rank}
            # then each owner sends its result
            for i, rank in turn:
                result = own_results.pop(i) if i in own_results else empty(i)
                in_flight.append((i, collectives.start_broadcast(result, self.axis, rank)))
                while len(in_flight) > limit:
                    first, sending = in_flight.popleft()
                    use(first, sending.wait())
        for i, sending in in_flight:
            use(i, sending.wait())

    def all_agree(self, yes: bool, device: torch.device | str) -> bool:
        """Return whether all ranks of the axis said yes at the first call. Every rank must call."""
        if self._all_agree is None:
            noes = collectives.all_reduce(torch.tensor([not yes], dtype=torch.int64, device=device), self.axis)
            self._all_agree = not noes.item()
        return self._all_agree


class ShardedMatrix:
    """One parameter, of which this rank has a part: a matrix [rows, in], or a stack of matrices [.., rows, in].

    local: shape of this rank's part, with padding; pieces: those of each rank of the axis, whose ranks call it
    together; owners: the ranks that have the same part.
    """

    def __init__(
        self,
        placement: Placement,
        local: tuple[int, ...],
        axis: Axis,
        pieces: Callable[[], list[Pieces]] = list,
        owners: MatrixOwners | None = None,
    ):
        self.shape = placement.shape if axis.size > 1 else local
        self.owners = owners or MatrixOwners()
        self._placement = placement
        self._local = local
        self._axis = axis
        self._pieces = pieces

    def gather(self, part: Tensor) -> Tensor:
        """Return the full matrix of a tensor laid out like the parameter: part [local shape] -> [global shape].

        The result has no padding; it is `part` itself if that is full already. Every rank of the axis must call.
        """
        if self._axis.size == 1:
            return part
        full = part.new_zeros(self.shape)
        parts = collectives.all_gather(part.contiguous(), self._axis).chunk(self._axis.size)  # one per rank
        for rank_part, rank_pieces in zip(parts, self._pieces()):
            for box, local in rank_pieces:
                full[slices(box)] = rank_part[slices(local)]
        return full

    def part(self, full: Tensor) -> Tensor:
        """Return this rank's part of `full`, padded with zeros: [global shape] -> [local shape]."""
        if self._axis.size == 1:
            return full
        part = full.new_zeros(self._local)
        for box, local in self._pieces()[self._axis.rank]:
            part[slices(local)] = full[slices(box)]
        return part

    def matrices(self, full: Tensor, *, split_groups: bool = True) -> tuple[Tensor, ...]:
        """Return views of the matrices that are fused in `full` [global shape], which is [all rows, in].

        They are [rows, in] each, such as gate and up, or [groups, rows, in] of those whose groups are interleaved, such
        as query, key and value. Of a stack they are [.., rows, in].
        """
        blocks = self._placement.blocks
        group = self._placement.interleaved
        if self.is_stack:
            return full.split(blocks or full.shape[-2], dim=-2)
        if group and split_groups:
            return full.unflatten(0, (-1, sum(group))).split(group, dim=1)
        if blocks:
            return full.split(blocks)
        return (full,)

    def rows_of_matrices(self, *, split_groups: bool = True) -> tuple[int, ...]:
        """Return the rows of each of `matrices`, those of all groups together."""
        blocks = self._placement.blocks
        group = self._placement.interleaved
        if group and split_groups and not self.is_stack:
            return tuple(self.shape[0] // sum(group) * rows for rows in group)
        return tuple(blocks) or (self.shape[-2],)

    @property
    def is_stack(self) -> bool:
        """Whether the parameter stacks matrices."""
        return len(self.shape) > 2


def full_matrices(
    parameters: Mapping[str, nn.Parameter],
    mesh: Mesh,
    device: torch.device | str,
    *,
    copies: Mapping[str, Axis] | None = None,
) -> dict[str, ShardedMatrix]:
    """Return the ShardedMatrix of each parameter, of which each rank of tp must have a part, and of experts' of etp.

    parameters: name -> [local shape]. The ranks exchange their pieces when the first matrix is gathered. copies: the
    axis of ranks that have the same part of a parameter and its state. Raises ConfigError for a parameter whose matrices
    are sharded over other axes.
    """
    placements = {name: _of_local_stack(p.placement, tuple(p.shape)) for name, p in parameters.items()}
    own_pieces: dict[str, dict[str, Pieces]] = {"tp": {}, "etp": {}}  # axis -> those of the parameters sharded over it
    for name, placement in placements.items():
        axes = set(placement.shard) or {"tp"}
        if axes != {"tp"} and axes != {"etp"}:
            raise ConfigError(
                f"{name} is sharded over {', '.join(sorted(axes))}, but an optimizer that updates complete tensors can "
                "gather shards only over tp, and of experts over etp"
            )
        (axis_name,) = axes
        if mesh[axis_name].size > 1 and (placement.shard or placement.rows):
            own_pieces[axis_name][name] = pieces(placement, tuple(parameters[name].shape), mesh)

    @cache
    def pieces_of_ranks(axis_name: str) -> list[dict[str, Pieces]]:
        text = json.dumps(own_pieces[axis_name])
        return [json.loads(text) for text in collectives.all_gather_texts(text, mesh[axis_name], device)]

    def pieces_of(name: str, axis_name: str) -> Callable[[], list[Pieces]]:
        return lambda: [rank_pieces[name] for rank_pieces in pieces_of_ranks(axis_name)]

    owners = {axis: MatrixOwners(axis) for axis in (copies or {}).values()}
    result = {}
    for name, placement in placements.items():
        axis_name = "etp" if name in own_pieces["etp"] else "tp"
        axis = mesh[axis_name] if name in own_pieces[axis_name] else ALONE
        parameter_owners = owners[copies[name]] if copies else None
        local = tuple(parameters[name].shape)
        result[name] = ShardedMatrix(placement, local, axis, pieces_of(name, axis_name), parameter_owners)
    return result


def _of_local_stack(placement: Placement, local: tuple[int, ...]) -> Placement:
    """Return the placement with the leading dimensions of a stack [E, .., out, in] as this rank has them.

    They are not gathered, since each rank updates the matrices that it has a part of.
    """
    leading = len(local) - 2
    shard = {axis: dim for axis, dim in placement.shard.items() if dim >= leading}
    if leading <= 0 or len(shard) == len(placement.shard):
        return placement
    return replace(placement, shape=(*local[:leading], *placement.shape[leading:]), shard=shard)
