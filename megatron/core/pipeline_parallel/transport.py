"""Transfers between pipeline stages: a tuple of tensors per microbatch, forwards and backwards over separate communicators.

Where tensor-parallel ranks hold equal copies of what passes (no sequence parallelism), each sends its t-th part to its
counterpart, and the receivers put the parts together again over the faster links that they share (arXiv:2104.04473, section 4.1).
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from megatron.core import comm
from megatron.core.errors import sequence_parallel_hint
from megatron.core.grid import Axis
from megatron.core.pending import Pending, all_of


@dataclass(frozen=True)
class TensorSpec:
    """What both ends of a transfer know of a tensor beforehand."""

    shape: tuple[int, ...]
    dtype: torch.dtype


Transfer = Pending[tuple[Tensor, ...]]  # whose result has arrived, or may be reused where it was sent


class Transport:
    """Sends and receives of one rank. `boundary`: the tensors that pass between two stages (one for GPT).

    `copies_over`: the axis whose ranks all hold the same of them, if there is one. Transfers between two ranks in one direction
    arrive in the order sent. poison: what is to be received is NaN until it arrives, so that a use before shows.
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

    def connect(self, neighbours: Iterable[tuple[int, int]]) -> None:
        """Let every two ranks that will exchange tensors do so once, in each direction's communicator; every rank must call.

        NCCL makes the connection of a pair at its first transfer, for which the hosts of both ends wait. In a
        schedule a receive is posted long before its send, so that a rank might never get there: our own schedules do,
        a fork's need not. And a network that does not work shows at the start. neighbours: those pairs, such as
        `StageMap.neighbours`. They come in one order: even ranks with the next, then odd ones with theirs.
        """
        for axis in self.axes.values():
            for one, other in sorted(neighbours, key=lambda pair: pair[0] % 2):
                x = torch.zeros(1, device=self.device)
                if axis.rank == one:
                    comm.start_send(x, axis, other).wait()
                elif axis.rank == other:
                    comm.start_recv(x, axis, one).wait()

    def send(self, direction: str, to: int, tensors: tuple[Tensor, ...]) -> Transfer:
        """Begin to send to pipeline rank `to`; the tensors may not be changed before the transfer's `wait`."""
        given = tuple(TensorSpec(tuple(x.shape), x.dtype) for x in tensors)
        if given != self.boundary:
            raise ValueError(
                f"a stage hands on {given}, but the stages agreed on {self.boundary}{_length_hint(given, self.boundary)}"
            )
        axis, over = self.axes[direction], self._copies_over
        if over is not None:
            tensors = tuple(x.reshape(-1)[comm.my_part(x.numel(), over)] for x in tensors)
        return all_of(comm.start_send(x, axis, to) for x in tensors)

    def post(self, direction: str, source: int) -> Transfer:
        """Begin to receive what pipeline rank `source` sends next in this direction."""
        axis, over = self.axes[direction], self._copies_over
        shapes = [spec.shape if over is None else (prod(spec.shape) // over.size,) for spec in self.boundary]
        made = [torch.empty(shape, dtype=spec.dtype, device=self.device) for shape, spec in zip(shapes, self.boundary)]
        for x in made if self._poison else ():
            if x.is_floating_point():
                x.fill_(float("nan"))
        coming = all_of(comm.start_recv(x, axis, source) for x in made)
        return coming if over is None else Pending(lambda: _whole(coming.wait(), self.boundary, over))


def _whole(parts: tuple[Tensor, ...], specs: tuple[TensorSpec, ...], axis: Axis) -> tuple[Tensor, ...]:
    return tuple(comm.all_gather(part, axis).view(spec.shape) for part, spec in zip(parts, specs))


def _length_hint(given: tuple[TensorSpec, ...], agreed: tuple[TensorSpec, ...]) -> str:
    """Why the hidden states may be of another length, where that is all that differs."""
    for mine, other in zip(given, agreed):
        if mine.dtype == other.dtype and mine.shape[1:] == other.shape[1:] and mine.shape != other.shape:
            return sequence_parallel_hint(mine.shape[0], other.shape[0])
    return ""
