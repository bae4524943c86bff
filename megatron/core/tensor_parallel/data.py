"""Megatron's `broadcast_data`."""

import torch
from torch import Tensor

from megatron.core.base.unsupported_arguments import takes
from megatron.core.parallel.global_state import current, get_mesh
from megatron.core.tensor_parallel.broadcast_batch import broadcast_tensors


@takes(tp_group=None)
def broadcast_data(keys: list[str], data: dict[str, Tensor] | None, datatype: torch.dtype) -> dict[str, Tensor]:
    """The tensors `keys` of the first tensor-parallel rank's `data`, on all ranks of the axis. Every rank must call."""
    return broadcast_tensors(keys, data, datatype, get_mesh()["tp"], current().device)
