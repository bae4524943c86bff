"""A batch read once per tensor-parallel group: its first rank reads it and broadcasts it to the others.

broadcast_batch       tensors of one shape, which every rank knows
broadcast_tensors     tensors of any shapes, which the first rank knows
"""

import torch
from torch import Tensor

from megatron.core.parallel import collectives
from megatron.core.parallel.accelerator import to_device
from megatron.core.parallel.grid import Axis


class GeneratedBatch(dict):
    """A batch that its rank generates when it is asked for tensors. Nothing is sent, so every rank of the axis has one."""

    def generate(
        self, keys: list[str], shape: tuple[int, ...] | None, dtype: torch.dtype, device: torch.device | str
    ) -> tuple[Tensor, ...]:
        """The tensors `keys`, of one shape; None: as this batch has them."""
        raise NotImplementedError


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
    if isinstance(data, GeneratedBatch):
        return data.generate(keys, shape, dtype, device)
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
    return collectives.broadcast(packed, axis).unbind()


_MOST_DIMENSIONS = 5


def broadcast_tensors(
    keys: list[str], data: dict[str, Tensor] | None, dtype: torch.dtype, axis: Axis, device: torch.device | str = "cpu"
) -> dict[str, Tensor]:
    """The tensors `keys` of the first rank's `data`, of at most 5 dimensions, on every rank of the axis, in two
    messages: of the
    shapes, and of the values. Every rank must call. TypeError for another dtype than `dtype`."""
    if isinstance(data, GeneratedBatch):
        return dict(zip(keys, data.generate(keys, None, dtype, device)))
    shapes = torch.full((len(keys), _MOST_DIMENSIONS), -1, dtype=torch.int64)
    if axis.is_first:
        wrong = {key: data[key].dtype for key in keys if data[key].dtype != dtype}
        if wrong:
            raise TypeError(f"the batch has {wrong}, not {dtype}; convert it")
        for row, key in zip(shapes, keys):
            row[: data[key].dim()] = torch.tensor(data[key].shape)
    if axis.size > 1:
        shapes = collectives.broadcast(shapes.to(device), axis)
    sizes = [tuple(n for n in row if n >= 0) for row in shapes.tolist()]
    numels = [torch.Size(size).numel() for size in sizes]
    flat = None
    if axis.is_first:
        flat = {"all": torch.cat([to_device(data[key].reshape(-1), device) for key in keys])}
    (flat,) = broadcast_batch(["all"], flat, dtype, (sum(numels),), axis, device)
    return {key: part.view(size) for key, part, size in zip(keys, flat.split(numels), sizes)}
