"""Transfers between pipeline stages: a tuple of tensors per microbatch, forwards and backwards over separate communicators.

Without sequence parallelism, tensor-parallel ranks hold equal copies of the boundary tensors. Then each rank sends a
shard, and
the receivers all-gather it over their faster links (arXiv:2104.04473, section 4.1).
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from megatron.core.base.async_handle import Pending, all_of
from megatron.core.base.error_reporting import sequence_parallel_hint
from megatron.core.base.memory_category import memory_kind, set_memory_kind
from megatron.core.parallel import collectives
from megatron.core.parallel.grid import Axis


@dataclass(frozen=True)
class TensorSpec:
    """Shape and dtype of a boundary tensor, known at both ends of a transfer."""

    shape: tuple[int, ...]
    dtype: torch.dtype


Transfer = Pending[
    tuple[Tensor, ...]
]  # after `wait` received tensors have arrived, and sent tensors may be overwritten


class Transport:
    """Sends and receives of one rank. Transfers between two ranks in one direction arrive in the order sent.

    boundary: the tensors that pass between two stages (one for GPT). copies_over: the axis whose ranks hold equal copies of
    them, or None. poison: fill receive buffers with NaN, so that a read before `wait` shows; for tests.
    """

    def __init__(
        self,
        mesh: Mapping[str, Axis],
        boundary: tuple[TensorSpec, ...],
        device: torch.device | str = "cpu",
        *,
        copies_over: Axis | None = None,
        poison: bool = False,
    ):
        self.axes = {"forward": mesh["pp_forward"], "backward": mesh["pp_backward"]}
        self.boundary, self.device = boundary, device
        self._poison = poison
        divides = copies_over is not None and all(prod(spec.shape) % copies_over.size == 0 for spec in boundary)
        self._copies_over = copies_over if divides and copies_over.size > 1 else None

    @memory_kind("communication")
    def connect(self, neighbours: Iterable[tuple[int, int]]) -> None:
        """Connects each pair of `neighbours` (`StageMap.neighbours`) in both directions. Every rank must call.

        NCCL connects a pair at its first transfer, and blocks the hosts of both ranks meanwhile. A schedule posts receives
        long before their sends, so a first transfer inside a script's schedule could deadlock. Connecting now also shows a
        broken network at the start. All ranks use one order: pairs of even ranks with the next rank, then those of odd
        ranks.
        """
        for axis in self.axes.values():
            for one, other in sorted(neighbours, key=lambda pair: pair[0] % 2):
                x = torch.zeros(1, device=self.device)
                if axis.rank == one:
                    collectives.start_send(x, axis, other).wait()
                elif axis.rank == other:
                    collectives.start_recv(x, axis, one).wait()

    @memory_kind("communication")
    def send(self, direction: str, to: int, tensors: tuple[Tensor, ...]) -> Transfer:
        """Starts to send to pipeline rank `to`; the tensors must not be overwritten before `wait`."""
        given = tuple(TensorSpec(tuple(x.shape), x.dtype) for x in tensors)
        if given != self.boundary:
            raise ValueError(
                f"a stage sends {given}, but the boundary is {self.boundary}{_length_hint(given, self.boundary)}"
            )
        set_memory_kind("communication", tensors)
        axis, over = self.axes[direction], self._copies_over
        if over is not None:
            # Each rank sends one part of what all hold: between nodes that is 1/t of the traffic.
            tensors = tuple(x.reshape(-1)[collectives.my_part(x.numel(), over)] for x in tensors)
        return all_of(collectives.start_send(x, axis, to) for x in tensors)

    @memory_kind("communication")
    def post(self, direction: str, source: int) -> Transfer:
        """Starts to receive the next transfer of pipeline rank `source` in this direction."""
        axis, over = self.axes[direction], self._copies_over
        shapes = [spec.shape if over is None else (prod(spec.shape) // over.size,) for spec in self.boundary]
        made = [torch.empty(shape, dtype=spec.dtype, device=self.device) for shape, spec in zip(shapes, self.boundary)]
        for x in made if self._poison else ():
            if x.is_floating_point():
                x.fill_(float("nan"))
        coming = all_of(collectives.start_recv(x, axis, source) for x in made)
        return coming if over is None else Pending(lambda: _whole(coming.wait(), self.boundary, over))


@memory_kind("communication")
def _whole(parts: tuple[Tensor, ...], specs: tuple[TensorSpec, ...], axis: Axis) -> tuple[Tensor, ...]:
    return tuple(collectives.all_gather(part, axis).view(spec.shape) for part, spec in zip(parts, specs))


def _length_hint(given: tuple[TensorSpec, ...], agreed: tuple[TensorSpec, ...]) -> str:
    """The hint of `sequence_parallel_hint` if only the sequence length differs; else ""."""
    for mine, other in zip(given, agreed):
        if mine.dtype == other.dtype and mine.shape[1:] == other.shape[1:] and mine.shape != other.shape:
            return sequence_parallel_hint(mine.shape[0], other.shape[0])
    return ""
