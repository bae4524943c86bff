"""A hash of weights that a checkpoint leaves out: a sum over elements, so it is the same in every layout."""

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from megatron.core.dist_checkpointing.local_tensor import LocalTensor
from megatron.core.offload.tensor_in_memory_or_file import start_reading
from megatron.core.parallel import collectives
from megatron.core.parallel.rank_grid import Axis
from megatron.core.sharding.boxes import Box

_MODEL = "model/"
_GOLDEN = -7046029254386353131  # 2^64 / the golden ratio, odd: far-spread multiples
_ELEMENTS_AT_ONCE = 2**20  # bounds the 64-bit copies


@torch.no_grad()
def elements_and_hash(tensors: Mapping[str, LocalTensor], world: Axis, device: torch.device | str) -> dict[str, Any]:
    """Return {"elements": number, "hash": of their bits} of whole tensors, by their names in a checkpoint.

    tensors: this rank's parts, of which those that it writes count. One all-reduce; every rank must call.
    """
    elements = 0
    total = torch.zeros((), dtype=torch.int64, device=device)
    for name, local in tensors.items():
        if not local.is_writer:
            continue
        hashed_name = hashlib.sha256(name.removeprefix(_MODEL).encode()).digest()
        of_name = int.from_bytes(hashed_name[:8], "little", signed=True) | 1
        for box, local_box in local.pieces:
            piece = start_reading(local.region((box, local_box))).wait()  # [size of the box]
            elements += piece.numel()
            total += of_name * _sum_of_bits(piece, box, local.shape).to(device)
    counts = collectives.all_reduce(torch.stack((torch.tensor(elements, device=device), total)), world)
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
