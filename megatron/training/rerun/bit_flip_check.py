"""Bits that change at rest: weights, masters and moments are hashed after an update, and again before they are next used.

    update | hash ... validation, save (checked first), forwards and backwards ... check | update

A hash takes one pass over this rank's state, two in an interval. Nothing is sent but one number, so that all ranks stop
together.
"""

import socket
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron.core.distributed.buffer_plan import ParamRange
from megatron.core.distributed.contiguous_buffers import ParamAndGradBuffer, Shard
from megatron.core.distributed.data_parallel import DistributedDataParallel
from megatron.core.offload.stored_tensor import Stored, read_parts
from megatron.core.ops.main_grad_interface import slot_of
from megatron.core.ops.tensor_hash import BLOCK_WORDS, block_hashes
from megatron.core.optimizer.flat_optimizer import FlatOptimizer
from megatron.core.optimizer.split_master import SplitMaster
from megatron.training.rerun.base_check import Check


class StateCheck(Check):
    """--check-state-hash-interval."""

    def __init__(self, *parts: Any):
        super().__init__(*parts)
        self._hashes: list[Tensor] | None = None
        self._taken = ""

    def begin(self) -> None:
        self._take("the start")

    def after_update(self, iteration: int) -> None:
        if iteration % self.config.check_state_hash_interval == 0:
            self._take(f"the update of iteration {iteration}")

    def before_save(self) -> None:
        self._check()

    def before_update(self) -> None:
        self._check()
        self._hashes = None  # of values that are about to change

    def _take(self, when: str) -> None:
        for chunk in self.chunks:
            chunk.finish_param_gather()
        self._hashes, self._taken = hashes_of(held_state(self.chunks, self.optimizer)), when

    def _check(self) -> None:
        if self._hashes is not None:
            changed = changes_since(self._hashes, held_state(self.chunks, self.optimizer))
            rank = f"rank {self.mesh['world'].rank} on {socket.gethostname()}"
            self.stop_if(f"bits of {rank} have changed since {self._taken}:{changed}" if changed else "")


class HeldTensor(NamedTuple):
    """A flat tensor that this rank keeps between two updates: elements from `start` of a buffer with these slots."""

    what: str
    values: Stored
    slots: Sequence[ParamRange]
    start: int = 0


def held_state(chunks: Sequence[DistributedDataParallel], optimizer: FlatOptimizer) -> Iterator[HeldTensor]:
    """Everything that this rank keeps of weights, masters and moments, in memory or in files, each bit once."""
    for chunk in chunks:
        for buffer in chunk.buffers:
            if buffer.params is not None:
                yield HeldTensor("weights", buffer.params.data, buffer.plan.param_ranges)
            else:
                yield from _of_shard("weights", buffer.param_shard, buffer)
        for name, parameter in chunk.module.named_parameters():
            if not parameter.requires_grad and slot_of(parameter) is None:
                yield HeldTensor("weights", parameter.data, [ParamRange(name, 0, parameter.numel())])
    for number, buffer in enumerate(optimizer.buffers):
        masters = optimizer.masters[number]
        if any(isinstance(stored, SplitMaster) for stored in masters.tensors):
            masters = Shard(masters.runs, [stored.residual for stored in masters.tensors], torch.int16)
        if buffer.is_half_precision:
            yield from _of_shard("masters", masters, buffer)
        for kind, shards in optimizer.moments.items():
            yield from _of_shard(kind, shards[number], buffer)


def _of_shard(what: str, shard: Shard, buffer: ParamAndGradBuffer) -> Iterator[HeldTensor]:
    for (start, _), values in zip(shard.runs, shard.tensors):
        yield HeldTensor(what, values, buffer.plan.param_ranges, start)


def hashes_of(state: Iterator[HeldTensor]) -> list[Tensor]:
    """The hashes of each tensor's blocks, on its device."""
    return [_blocks(held.values) for held in state]


def _blocks(values: Stored) -> Tensor:
    return torch.cat([block_hashes(part) for part in read_parts(values)] or [torch.zeros(0, dtype=torch.int64)])


def changes_since(before: list[Tensor], state: Iterator[HeldTensor]) -> str:
    """The places whose hashes differ from those of `before`, one a line; "" if there are none."""
    lines = []
    for held, then in zip(state, before, strict=True):
        now = _blocks(held.values)
        if not torch.equal(now, then):
            lines += [_place(held, block) for block in (now != then).nonzero().view(-1).tolist()]
    more = f"\n  and {len(lines) - 10} more" if len(lines) > 10 else ""
    return "".join(f"\n  {line}" for line in lines[:10]) + more


def _place(held: HeldTensor, block: int) -> str:
    """The parameters whose elements lie in a block, with the range of the elements."""
    width = 4 * BLOCK_WORDS // held.values.dtype.itemsize
    first = held.start + block * width
    last = held.start + min((block + 1) * width, held.values.numel())
    inside = [
        f"{slot.name} (elements {max(first, slot.start) - slot.start} to {min(last, slot.stop) - slot.start - 1})"
        for slot in held.slots
        if slot.start < last and first < slot.stop
    ]
    return f"{held.what} of {', '.join(inside) or 'no parameter'}"
