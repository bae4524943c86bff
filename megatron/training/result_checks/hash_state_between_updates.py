"""Bits that change at rest are detected: weights, masters and moments are hashed after an update, and again before use.

    update | hash ... validation, save (checked first), forwards and backwards ... check | update

A hash takes one pass over this rank's state, two in an interval. Only one number is communicated, so that all
ranks stop together.
"""

import socket
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron.core.distributed.buffer_plan import ParamRange
from megatron.core.distributed.contiguous_buffers import ParamBuffer, Shard
from megatron.core.distributed.data_parallel import DistributedDataParallel
from megatron.core.distributed.param_grad_state import place_in_bucket
from megatron.core.offload.tensor_in_memory_or_file import Stored, read_parts
from megatron.core.ops.tensor_hash import BLOCK_WORDS, block_hashes
from megatron.core.optimizer.flat_optimizer import FlatOptimizer
from megatron.core.optimizer.split_master import SplitMaster
from megatron.training.result_checks.base_check import Check


class StateCheck(Check):
    """--check-state-hash-interval: compare hashes of the state after an update with those before the next."""

    def __init__(self, *parts: Any):
        super().__init__(*parts)
        self._hashes: list[Tensor] | None = None
        self._hashed_at = ""  # in words

    def begin(self) -> None:
        self._hash_state("the start")

    def after_update(self, iteration: int) -> None:
        if iteration % self.config.check_state_hash_interval == 0:
            self._hash_state(f"the update of iteration {iteration}")

    def before_save(self) -> None:
        self._check()

    def before_update(self) -> None:
        self._check()
        self._hashes = None  # of values that are about to change

    def _hash_state(self, when: str) -> None:
        for chunk in self.chunks:
            chunk.finish_param_gather()
        self._hashes = hashes_of(resident_state(self.chunks, self.optimizer))
        self._hashed_at = when

    def _check(self) -> None:
        if self._hashes is None:
            return
        changes = changes_since(self._hashes, resident_state(self.chunks, self.optimizer))
        rank = f"rank {self.mesh['world'].rank} on {socket.gethostname()}"
        self.stop_if(f"bits of {rank} have changed since {self._hashed_at}:{changes}" if changes else "")


class StateTensor(NamedTuple):
    """A flat tensor that this rank keeps between two updates."""

    kind: str  # weights, masters, or the name of a moment
    values: Stored  # [elements]
    param_ranges: Sequence[ParamRange]  # of the buffer
    start: int = 0  # the first element's place in the buffer


def resident_state(chunks: Sequence[DistributedDataParallel], optimizer: FlatOptimizer) -> Iterator[StateTensor]:
    """Yield all that this rank keeps of weights, masters and moments, in memory or in files, each bit once.

    Each is flat, [elements], but for a frozen parameter in no buffer, which has its own shape. Nothing is communicated.
    """
    # weights: in whole buffers, or with ZeRO 3 in shards; frozen ones are in no buffer before ZeRO 3
    for chunk in chunks:
        for buffer in (*chunk.buffers, *chunk.frozen_buffers):
            if buffer.params is not None:
                yield StateTensor("weights", buffer.params.data, buffer.plan.param_ranges)
            else:
                yield from _tensors_of_shard("weights", buffer.param_shard, buffer)
        for name, parameter in chunk.module.named_parameters():
            if place_in_bucket(parameter) is None:
                yield StateTensor("weights", parameter.data, [ParamRange(name, 0, parameter.numel())])

    # masters and moments; a float32 parameter is its own master
    for number, buffer in enumerate(optimizer.buffers):
        masters = optimizer.masters[number]
        if any(isinstance(stored, SplitMaster) for stored in masters.tensors):
            # the upper bits of a split master are the weights
            masters = Shard(masters.runs, [stored.residual for stored in masters.tensors], torch.int16)
        if buffer.is_half_precision:
            yield from _tensors_of_shard("masters", masters, buffer)
        for kind, shards in optimizer.moments.items():
            yield from _tensors_of_shard(kind, shards[number], buffer)


def _tensors_of_shard(kind: str, shard: Shard, buffer: ParamBuffer) -> Iterator[StateTensor]:
    for (start, _), values in zip(shard.runs, shard.tensors):
        yield StateTensor(kind, values, buffer.plan.param_ranges, start)


def hashes_of(state: Iterator[StateTensor]) -> list[Tensor]:
    """Return the hashes of each tensor's blocks, on its device: int64 [blocks] each."""
    return [_hash_blocks(tensor.values) for tensor in state]


def _hash_blocks(values: Stored) -> Tensor:
    """Return a hash for each block of a tensor: [elements] -> [blocks]. A tensor in a file is read part by part."""
    hashes = [block_hashes(part) for part in read_parts(values)]
    if not hashes:
        return torch.zeros(0, dtype=torch.int64)
    return torch.cat(hashes)


def changes_since(before: list[Tensor], state: Iterator[StateTensor]) -> str:
    """Return the places whose hashes differ from those of `before`, one a line; "" if there are none.

    before: as of `hashes_of`, int64 [blocks] each, of the same tensors in the same order.
    """
    lines = []
    for tensor, hashes_before in zip(state, before, strict=True):
        hashes = _hash_blocks(tensor.values)
        if torch.equal(hashes, hashes_before):
            continue
        for block in (hashes != hashes_before).nonzero().view(-1).tolist():
            lines.append(_place(tensor, block))
    more = f"\n  and {len(lines) - 10} more" if len(lines) > 10 else ""
    return "".join(f"\n  {line}" for line in lines[:10]) + more


def _place(tensor: StateTensor, block: int) -> str:
    """Return the parameters with elements in a block, with the range of these elements, in words."""
    block_elements = 4 * BLOCK_WORDS // tensor.values.dtype.itemsize
    first = tensor.start + block * block_elements
    stop = tensor.start + min((block + 1) * block_elements, tensor.values.numel())
    parameters = []
    for param in tensor.param_ranges:
        if param.start < stop and first < param.stop:
            first_element = max(first, param.start) - param.start
            last_element = min(stop, param.stop) - param.start - 1
            parameters.append(f"{param.name} (elements {first_element} to {last_element})")
    return f"{tensor.kind} of {', '.join(parameters) or 'no parameter'}"
