"""Whole tensors of parameters that are sharded over tensor-parallel ranks, for updates that need matrices.

    whole = tensor.gather(momentum)        one all-gather over tp; all its ranks must call, for its parameters in their order
    momentum_part = tensor.part(direction(whole))

An update is written as for one process and gives the same numbers in every layout. Ranks of tp repeat each other's
computation.
"""

import json
from collections.abc import Callable, Mapping
from functools import cache

import torch
from torch import Tensor, nn

from megatron.core import comm
from megatron.core.boxes import Box, slices
from megatron.core.config import ConfigError
from megatron.core.grid import ALONE, Axis
from megatron.core.mesh import Mesh
from megatron.core.placement import Placement, pieces

Pieces = list[tuple[Box, Box]]  # (box in the whole tensor, box in the local one)


class WholeTensor:
    """One parameter. local: shape of this rank's part, with padding; pieces: of each rank of the axis, whose ranks call it
    together."""

    def __init__(
        self, placement: Placement, local: tuple[int, ...], axis: Axis, pieces: Callable[[], list[Pieces]] = list
    ):
        self.shape = placement.shape if axis.size > 1 else local
        self._placement, self._local = placement, local
        self._axis, self._pieces = axis, pieces

    def gather(self, mine: Tensor) -> Tensor:
        """The whole of a tensor laid out like the parameter, without padding; `mine` itself if it is whole already."""
        if self._axis.size == 1:
            return mine
        whole = mine.new_zeros(self.shape)
        for part, held in zip(comm.all_gather(mine.contiguous(), self._axis).chunk(self._axis.size), self._pieces()):
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


def whole_tensors(
    parameters: Mapping[str, nn.Parameter], mesh: Mesh, device: torch.device | str
) -> dict[str, WholeTensor]:
    """The WholeTensor of each parameter, of which each rank of tp must have a part. The ranks exchange their pieces when the
    first tensor is gathered."""
    tp, divided = mesh["tp"], {}
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
        return [json.loads(text) for text in comm.all_gather_texts(json.dumps(divided), tp, device)]

    return {
        name: WholeTensor(p.placement, tuple(p.shape), tp, lambda name=name: [theirs[name] for theirs in held()])
        if name in divided
        else WholeTensor(p.placement, tuple(p.shape), ALONE)
        for name, p in parameters.items()
    }
