"""Whole tensors of parameters that are sharded over tensor-parallel ranks, for updates that need matrices.

    whole = tensor.gather(momentum)        one all-gather over tp; all its ranks must call, for its parameters in their order
    momentum_part = tensor.part(direction(whole))

An update is written as for one process and gives the same numbers in every layout. Ranks of tp repeat each other's
computation. Ranks that hold the same parts (data-parallel ones at ZeRO stage 0) do, too, unless the update divides it:
`Owners.share`.
"""

import json
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import cache

import torch
from torch import Tensor, nn

from megatron.core.base.async_handle import Pending
from megatron.core.base.dataclass_flags import ConfigError
from megatron.core.optimizer.matrix_owners import turns_of
from megatron.core.parallel import collectives
from megatron.core.parallel.grid import ALONE, Axis
from megatron.core.parallel.mesh import Mesh
from megatron.core.sharding.boxes import Box, slices
from megatron.core.sharding.placement import Placement, pieces

Pieces = list[tuple[Box, Box]]  # (box in the whole tensor, box in the local one)


_IN_FLIGHT = 2  # results on their way, which take memory: enough that one travels while the next is found


class Owners:
    """The ranks of `axis`, which hold the same parts of some tensors: each can find the results of some, for all."""

    def __init__(self, axis: Axis = ALONE):
        self.axis = axis
        self._all_say: bool | None = None

    def share(
        self,
        work: Sequence[int],
        find: Callable[[int], Tensor],
        empty: Callable[[int], Tensor],
        use: Callable[[int, Tensor], None],
    ) -> None:
        """Call use(i, result) for every tensor i, whose owner alone has called find(i); the others receive it into empty(i),
        of the same shape and dtype, contiguous. Every rank of the axis must call, with equal work.

        One broadcast a tensor, in flight while the next results are found. work: of each tensor, to divide it evenly.
        """
        sent: deque[tuple[int, Pending[Tensor]]] = deque()
        for turn in turns_of(tuple(work), self.axis.size):
            found = {i: find(i) for i, rank in turn if rank == self.axis.rank}
            for i, rank in turn:
                result = found.pop(i) if i in found else empty(i)
                sent.append((i, collectives.start_broadcast(result, self.axis, rank)))
                while len(sent) > min(_IN_FLIGHT, self.axis.size - 1):
                    first, sending = sent.popleft()
                    use(first, sending.wait())
        for i, sending in sent:
            use(i, sending.wait())

    def all_say(self, yes: bool, device: torch.device | str) -> bool:
        """Whether all ranks of the axis say yes, when they are asked first. Every rank must call."""
        if self._all_say is None:
            noes = collectives.all_reduce(torch.tensor([not yes], dtype=torch.int64, device=device), self.axis)
            self._all_say = not noes.item()
        return self._all_say


class WholeTensor:
    """One parameter. local: shape of this rank's part, with padding; pieces: of each rank of the axis, whose ranks call it
    together; owners: the ranks that hold the same part."""

    def __init__(
        self,
        placement: Placement,
        local: tuple[int, ...],
        axis: Axis,
        pieces: Callable[[], list[Pieces]] = list,
        owners: Owners | None = None,
    ):
        self.shape = placement.shape if axis.size > 1 else local
        self.owners = owners or Owners()
        self._placement, self._local = placement, local
        self._axis, self._pieces = axis, pieces

    def gather(self, mine: Tensor) -> Tensor:
        """The whole of a tensor laid out like the parameter, without padding; `mine` itself if it is whole already."""
        if self._axis.size == 1:
            return mine
        whole = mine.new_zeros(self.shape)
        for part, held in zip(
            collectives.all_gather(mine.contiguous(), self._axis).chunk(self._axis.size), self._pieces()
        ):
            for box, local in held:
                whole[slices(box)] = part[slices(local)]
        return whole

    def part(self, whole: Tensor) -> Tensor:
        """This rank's part of `whole`, padded with zeros."""
        if self._axis.size == 1:
            return whole
        mine = whole.new_zeros(self._local)
        for box, local in self._pieces()[self._axis.rank]:
            mine[slices(local)] = whole[slices(box)]
        return mine

    def matrices(self, whole: Tensor, *, split_groups: bool = True) -> tuple[Tensor, ...]:
        """Views of the matrices that lie fused in `whole`: [rows, in], or [groups, rows, in] of those whose groups are
        interleaved."""
        blocks, group = self._placement.blocks, self._placement.interleaved
        if group and split_groups:
            return whole.unflatten(0, (-1, sum(group))).split(group, dim=1)
        return whole.split(blocks) if blocks else (whole,)

    def rows_of_matrices(self, *, split_groups: bool = True) -> tuple[int, ...]:
        """Rows of each of `matrices`, those of all groups together."""
        blocks, group = self._placement.blocks, self._placement.interleaved
        if group and split_groups:
            return tuple(self.shape[0] // sum(group) * rows for rows in group)
        return tuple(blocks) or (self.shape[0],)


def whole_tensors(
    parameters: Mapping[str, nn.Parameter],
    mesh: Mesh,
    device: torch.device | str,
    *,
    copies: Mapping[str, Axis] | None = None,
) -> dict[str, WholeTensor]:
    """The WholeTensor of each parameter, of which each rank of tp must have a part. The ranks exchange their pieces when the
    first tensor is gathered. copies: the axis of ranks that hold the same part of a parameter and its state."""
    tp, divided = mesh["tp"], {}
    owners = {axis: Owners(axis) for axis in (copies or {}).values()}
    for name, parameter in parameters.items():
        placement = parameter.placement
        if others := set(placement.shard) - {"tp"}:
            raise ConfigError(
                f"{name} is sharded over {', '.join(others)}; an optimizer of whole tensors gathers over tp only"
            )
        if tp.size > 1 and (placement.shard or placement.rows):
            divided[name] = pieces(placement, tuple(parameter.shape), mesh)

    @cache
    def held() -> list[dict[str, Pieces]]:
        return [json.loads(text) for text in collectives.all_gather_texts(json.dumps(divided), tp, device)]

    def tensor(name: str, parameter: nn.Parameter) -> WholeTensor:
        axis = tp if name in divided else ALONE
        pieces_of = lambda: [theirs[name] for theirs in held()]  # noqa: E731
        return WholeTensor(
            parameter.placement, tuple(parameter.shape), axis, pieces_of, owners[copies[name]] if copies else None
        )

    return {name: tensor(name, parameter) for name, parameter in parameters.items()}
