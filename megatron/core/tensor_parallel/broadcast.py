"""A batch read once per tensor-parallel group: its first rank reads it and broadcasts it to the others."""

import torch
from torch import Tensor

from megatron.core import comm
from megatron.core.device import to_device
from megatron.core.grid import Axis


def broadcast_batch(
    keys: list[str],
    data: dict[str, Tensor] | None,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    axis: Axis,
    device: torch.device | str = "cpu",
) -> tuple[Tensor, ...]:
    """The tensors `keys` of the first rank's `data`, on every rank of the axis, in one message. Every rank must call.

    `data` may be None on other ranks. All tensors have `shape`, which every rank knows from the configuration.
    """
    if hasattr(data, "stand_ins"):  # a dry run, which has no data
        return data.stand_ins(keys, shape, dtype, device)
    if axis.is_first:
        wrong = {key: tuple(data[key].shape) for key in keys if tuple(data[key].shape) != tuple(shape)}
        if wrong:
            raise ValueError(f"the batch holds {wrong}, but the settings say {tuple(shape)}")
        parts = [data[key].to(dtype) for key in keys]
        if any(part.device.type != "cpu" for part in parts):  # a loader may have copied some to the device already
            parts = [to_device(part, device) for part in parts]
        packed = to_device(torch.stack(parts), device)
    else:
        packed = torch.empty((len(keys), *shape), dtype=dtype, device=device)
    return comm.broadcast(packed, axis).unbind()
