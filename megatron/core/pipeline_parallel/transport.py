"""Transfers between pipeline stages: a tuple of tensors per microbatch, forwards and backwards over separate communicators."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron.core import comm
from megatron.core.grid import Axis


@dataclass(frozen=True)
class TensorSpec:
    """What both ends of a transfer know of a tensor beforehand."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class Transport:
    """Sends and receives of one rank. `boundary`: the tensors that pass between two stages (one for GPT).

    Transfers between two ranks in one direction arrive in the order sent. A send may return before its tensors have left; the
    next one in that direction waits for it, which the order of the schedule allows even where sends block.
    """

    def __init__(self, mesh: Mapping[str, Axis], boundary: tuple[TensorSpec, ...], device: torch.device | str = "cpu"):
        self.axes = {"forward": mesh["pp_forward"], "backward": mesh["pp_backward"]}
        self.boundary, self.device = boundary, device
        self._leaving: dict[str, list[comm.Pending]] = {"forward": [], "backward": []}

    def send(self, direction: str, to: int, tensors: tuple[Tensor, ...]) -> None:
        """Begin to send to pipeline rank `to`; the tensors may not be changed before `finish`."""
        given = tuple(TensorSpec(tuple(x.shape), x.dtype) for x in tensors)
        if given != self.boundary:
            raise ValueError(f"a stage hands on {given}, but the stages agreed on {self.boundary}")
        self._wait(direction)
        self._leaving[direction] = [comm.start_send(x, self.axes[direction], to) for x in tensors]

    def recv(self, direction: str, source: int) -> tuple[Tensor, ...]:
        """What pipeline rank `source` sends next in this direction."""
        made = [torch.empty(spec.shape, dtype=spec.dtype, device=self.device) for spec in self.boundary]
        pending = [comm.start_recv(x, self.axes[direction], source) for x in made]
        return tuple(one.wait() for one in pending)

    def finish(self) -> None:
        """Wait until everything has left."""
        for direction in self._leaving:
            self._wait(direction)

    def _wait(self, direction: str) -> None:
        for pending in self._leaving[direction]:
            pending.wait()
        self._leaving[direction] = []
