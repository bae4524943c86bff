"""Checkpoints without frozen parameters (--no-save-frozen): what was trained, and a hash of the base that it was trained on.

    save     `model/<parameter>` of trained parameters alone; the state's "frozen" has the number and the hash of the others
    load     frozen parameters come from --pretrained-checkpoint, and must have this hash

The hash is a sum over elements, so it is the same in every layout.
"""

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from megatron.convert import open_any
from megatron.core.base.dataclass_flags import ConfigError
from megatron.core.dist_checkpointing.local_tensor import LocalTensor
from megatron.core.distributed.data_parallel import DistributedDataParallel
from megatron.core.offload.stored_tensor import start_reading
from megatron.core.optimizer.sharded_model_and_optimizer_state import sharded_model_state
from megatron.core.parallel import collectives
from megatron.core.parallel.mesh import Mesh
from megatron.core.sharding.boxes import Box
from megatron.core.storage.path_or_url import path_of
from megatron.training.arguments.config import CheckpointConfig
from megatron.training.global_vars import print_rank_0

_MODEL = "model/"
_GOLDEN = -7046029254386353131  # 2^64 / the golden ratio, odd: far-spread multiples
_ELEMENTS_AT_ONCE = 2**20  # bounds the 64-bit copies

Chunks = Sequence[DistributedDataParallel]


def frozen_names(chunks: Chunks) -> set[str]:
    """Return the names in a checkpoint of this rank's frozen parameters."""
    return {
        f"{_MODEL}{name}"
        for chunk in chunks
        for name, parameter in chunk.module.named_parameters()
        if not parameter.requires_grad
    }


@torch.no_grad()
def frozen_state(chunks: Chunks, mesh: Mesh, device: torch.device | str) -> dict[str, Any]:
    """Return the number of frozen elements of the whole model, and their hash. One all-reduce; every rank must call."""
    elements = 0
    total = torch.zeros((), dtype=torch.int64, device=device)
    frozen = frozen_names(chunks)
    for name, local in sharded_model_state(chunks, mesh).items():
        if name not in frozen or not local.is_writer:
            continue
        hashed_name = hashlib.sha256(name.removeprefix(_MODEL).encode()).digest()
        of_name = int.from_bytes(hashed_name[:8], "little", signed=True) | 1
        for box, local_box in local.pieces:
            piece = start_reading(local.region((box, local_box))).wait()  # [size of the box]
            elements += piece.numel()
            total += of_name * _sum_of_bits(piece, box, local.shape).to(device)
    counts = collectives.all_reduce(torch.stack((torch.tensor(elements, device=device), total)), mesh["world"])
    count, value = counts.tolist()
    return {"elements": count, "hash": f"{value % 2**64:016x}"}


_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes


def _sum_of_bits(piece: Tensor, box: Box, shape: Sequence[int]) -> Tensor:
    """Return the sum of the elements' bits, each times an odd weight of its place in a tensor of `shape`, modulo 2^64.

    piece: [size of the box].
    """
    strides = [1] * len(shape)
    for dim in range(len(shape) - 2, -1, -1):
        strides[dim] = strides[dim + 1] * shape[dim + 1]
    total = torch.zeros((), dtype=torch.int64, device=piece.device)
    if not shape:
        return piece.contiguous().view(1).view(_INTEGERS[piece.element_size()]).long().sum()
    rows_at_once = max(1, _ELEMENTS_AT_ONCE * len(piece) // max(1, piece.numel()))
    for first in range(0, len(piece), rows_at_once):
        part = piece[first : first + rows_at_once].contiguous()
        index = torch.zeros((), dtype=torch.int64, device=piece.device)
        for dim, (start, _) in enumerate(box):
            begin = start + (first if dim == 0 else 0)
            places = torch.arange(begin, begin + part.shape[dim], device=piece.device) * strides[dim]
            index = index.unsqueeze(-1) + places  # one more dimension each time
        bits = part.view(_INTEGERS[part.element_size()]).long()
        total += (bits * ((2 * index + 1) * _GOLDEN)).sum()
    return total


def load_base(
    chunks: Chunks,
    parameters: Mapping[str, LocalTensor],
    config: CheckpointConfig,
    saved: Mapping[str, Any],
    source: str,
    mesh: Mesh,
    device: torch.device,
) -> None:
    """Fill the frozen parameters from --pretrained-checkpoint, and check that they are the base of the checkpoint.

    saved: the entry `FROZEN` of the checkpoint's state. source: its flag and folder. Every rank must call. Raises ConfigError, or
    CheckpointError for damage.
    """
    root = config.pretrained_checkpoint
    if root is None:
        raise ConfigError(
            f"{source} holds what was trained alone, without the {saved['elements']:,} frozen weights of its base; give the "
            "base model as --pretrained-checkpoint"
        )
    own = frozen_names(chunks)
    base = open_any(path_of(root), None, mesh["world"], device)
    base.read_into(
        {name: local for name, local in parameters.items() if name in own}, mesh["world"], convert=True, device=device
    )
    now = frozen_state(chunks, mesh, device)
    if now != dict(saved):
        raise ConfigError(
            f"--pretrained-checkpoint {root} is not the base of {source}: its frozen weights are {now['elements']:,} with "
            f"hash {now['hash']}, those of the base were {saved['elements']:,} with hash {saved['hash']}; give the folder that "
            "the run began from, in the same precision"
        )
    print_rank_0(f"loaded the frozen weights from {root}")
