"""Transfers between pipeline stages: a tuple of tensors per microbatch, over one communicator per direction.

Without sequence parallelism, tensor-parallel ranks hold equal copies of the boundary tensors. Then each rank sends a
shard, and the receivers all-gather it over their faster links (arXiv:2104.04473, section 4.1).

    stage 0, tp rank 0: x = [x0 x1]    --x0-->    stage 1, tp rank 0: x0    all-gather    [x0 x1]
    stage 0, tp rank 1: x = [x0 x1]    --x1-->    stage 1, tp rank 1: x1    --------->    [x0 x1]
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from megatron.core.base.async_handle import AsyncHandle, all_of
from megatron.core.base.label_allocations_by_memory_kind import memory_kind, set_memory_kind
from megatron.core.base.user_error_and_torchrun_error_file import sequence_parallel_hint
from megatron.core.parallel import collectives
from megatron.core.parallel.rank_grid import Axis


@dataclass(frozen=True)
class TensorSpec:
    """Shape and dtype of a boundary tensor, known at both ends of a transfer."""

    shape: tuple[int, ...]
    dtype: torch.dtype


# After `wait` received tensors have arrived, and sent tensors may be overwritten.
Transfer = AsyncHandle[tuple[Tensor, ...]]


class Transport:
    """The sends and receives of one rank. Transfers between two ranks in one direction arrive in the order sent.

    boundary: the tensors that pass between two stages (one for GPT, [s, b, h]).
    copies_over: the axis whose ranks hold equal copies of them, or None.
    poison: fill receive buffers with NaN, so that a read before `wait` shows; for tests.
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
        self.boundary = boundary
        self.device = device
        self._poison = poison
        self._copies_over: Axis | None = None  # the axis whose ranks each send a shard; None: each sends all
        has_copies = copies_over is not None and copies_over.size > 1
        if has_copies and all(prod(spec.shape) % copies_over.size == 0 for spec in boundary):
            self._copies_over = copies_over

    @memory_kind("communication")
    def connect(self, neighbours: Iterable[tuple[int, int]]) -> None:
        """Connect each pair of `neighbours` (`StageMap.neighbours`) in both directions. Every rank must call.

        NCCL connects a pair at its first transfer, and blocks the hosts of both ranks meanwhile. A schedule posts
        receives long before their sends, so a first transfer inside a script's schedule could deadlock. Connecting now
        also shows a broken network at the start. All ranks use one order: pairs of even ranks with the next rank, then
        those of odd ranks.
        """
        for axis in self.axes.values():
            for low, high in sorted(neighbours, key=lambda pair: pair[0] % 2):
                x = torch.zeros(1, device=self.device)
                if axis.rank == low:
                    collectives.start_send(x, axis, high).wait()
                elif axis.rank == high:
                    collectives.start_recv(x, axis, low).wait()

    @memory_kind("communication")
    def send(self, direction: str, to: int, tensors: tuple[Tensor, ...]) -> Transfer:
        """Start to send to pipeline rank `to`, which must `post`. The tensors must not be overwritten before `wait`.

        tensors: of the shapes and dtypes of `boundary`; ValueError otherwise.
        """
        sent = tuple(TensorSpec(tuple(x.shape), x.dtype) for x in tensors)
        if sent != self.boundary:
            raise ValueError(
                f"a stage sends {sent}, but the expected activations between stages are "
                f"{self.boundary}{_length_hint(sent, self.boundary)}"
            )
        set_memory_kind("communication", tensors)
        copies_over = self._copies_over
        if copies_over is not None:
            # Each rank sends its shard of the copies: between nodes that is 1/t of the traffic.
            tensors = tuple(x.reshape(-1)[collectives.local_slice(x.numel(), copies_over)] for x in tensors)  # [n / t]
        axis = self.axes[direction]
        return all_of(collectives.start_send(x, axis, to) for x in tensors)

    @memory_kind("communication")
    def post(self, direction: str, source: int) -> Transfer:
        """Start to receive the next transfer of pipeline rank `source` in this direction, which must `send`.

        `wait` returns new tensors of the shapes and dtypes of `boundary`; with `copies_over` every rank of that axis
        must call it.
        """
        # allocate the buffers
        copies_over = self._copies_over
        buffers = []
        for spec in self.boundary:
            shape = spec.shape if copies_over is None else (prod(spec.shape) // copies_over.size,)
            x = torch.empty(shape, dtype=spec.dtype, device=self.device)
            if self._poison and x.is_floating_point():
                x.fill_(float("nan"))
            buffers.append(x)

        # receive, and gather the shards
        axis = self.axes[direction]
        receiving = all_of(collectives.start_recv(x, axis, source) for x in buffers)
        if copies_over is None:
            return receiving
        return AsyncHandle(lambda: _gather_shards(receiving.wait(), self.boundary, copies_over))


@memory_kind("communication")
def _gather_shards(shards: tuple[Tensor, ...], specs: tuple[TensorSpec, ...], axis: Axis) -> tuple[Tensor, ...]:
    """All-gather flat shards of [n / t] elements, and return tensors of the shapes of `specs`."""
    return tuple(collectives.all_gather(shard, axis).view(spec.shape) for shard, spec in zip(shards, specs))


def _length_hint(sent: tuple[TensorSpec, ...], boundary: tuple[TensorSpec, ...]) -> str:
    """Return the hint of `sequence_parallel_hint` if only the sequence length differs; else ""."""
    for spec, expected in zip(sent, boundary):
        if spec.dtype == expected.dtype and spec.shape[1:] == expected.shape[1:] and spec.shape != expected.shape:
            return sequence_parallel_hint(spec.shape[0], expected.shape[0])
    return ""
