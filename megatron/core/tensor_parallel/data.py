"""Megatron's `broadcast_data`."""

import torch
from torch import Tensor

from megatron.core.base.unsupported_arguments import accepts_defaults_only
from megatron.core.parallel.global_state import get_global_state, get_mesh
from megatron.core.process_groups_config import OWN_TP_GROUP
from megatron.core.tensor_parallel.broadcast_batch_over_tp import broadcast_tensors


@accepts_defaults_only(tp_group=OWN_TP_GROUP)
def broadcast_data(keys: list[str], data: dict[str, Tensor] | None, datatype: torch.dtype) -> dict[str, Tensor]:
    """Broadcast the tensors `keys` of the first tensor-parallel rank's `data` over the axis. Every rank must call.

    The result has the first rank's tensors by key, of any shapes of at most 5 dimensions, on the device of the process.
    Raises TypeError on the first rank for another dtype than `datatype`.
    """
    return broadcast_tensors(keys, data, datatype, get_mesh()["tp"], get_global_state().device)
