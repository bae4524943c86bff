"""A batch read once per tensor-parallel group: its first rank reads it and broadcasts it to the others.

broadcast_batch       tensors of one shape, which every rank knows
broadcast_tensors     tensors of any shapes, which the first rank knows
"""

import torch
from torch import Tensor

from megatron.core.parallel import collectives
from megatron.core.parallel.accelerator import to_device
from megatron.core.parallel.rank_grid import Axis


class GeneratedBatch(dict):
    """A batch that each rank generates by itself when its tensors are requested.

    Nothing is broadcast, so every rank of the axis has one.
    """

    def generate(
        self, keys: list[str], shape: tuple[int, ...] | None, dtype: torch.dtype, device: torch.device | str
    ) -> tuple[Tensor, ...]:
        """Return the tensors `keys`, each of `shape`; None: of the shapes that this batch gives them.

        They have `dtype` and are on `device`. A subclass overrides this; here it raises NotImplementedError.
        """
        raise NotImplementedError


def broadcast_batch(
    keys: list[str],
    data: dict[str, Tensor] | None,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    axis: Axis,
    device: torch.device | str = "cpu",
) -> tuple[Tensor, ...]:
    """Broadcast the tensors `keys` of the first rank's `data` over the axis, in one message. Every rank must call.

    `data` may be None on other ranks. All tensors have `shape`, which every rank knows from the configuration; the
    result has one of this shape for each key, in `dtype`, on `device`. Raises ValueError on the first rank for
    another shape.
    """
    if isinstance(data, GeneratedBatch):
        return data.generate(keys, shape, dtype, device)
    if axis.is_first:
        wrong_shapes = {key: tuple(data[key].shape) for key in keys if tuple(data[key].shape) != tuple(shape)}
        if wrong_shapes:
            raise ValueError(f"the batch has the shapes {wrong_shapes}, but the settings give {tuple(shape)}")
        tensors = [data[key].to(dtype) for key in keys]
        if any(x.device.type != "cpu" for x in tensors):  # a loader may have copied some to the device already
            tensors = [to_device(x, device) for x in tensors]
        packed = to_device(torch.stack(tensors), device)  # [keys, *shape]
    else:
        packed = torch.empty((len(keys), *shape), dtype=dtype, device=device)
    return collectives.broadcast(packed, axis).unbind()


_MAX_DIMS = 5


def broadcast_tensors(
    keys: list[str], data: dict[str, Tensor] | None, dtype: torch.dtype, axis: Axis, device: torch.device | str = "cpu"
) -> dict[str, Tensor]:
    """Broadcast the tensors `keys` of the first rank's `data`, of at most 5 dimensions, over the axis.

    The result has the first rank's shapes, by key, on `device`. In two messages: the shapes, then the values. Every
    rank must call. Raises TypeError on the first rank for another dtype than `dtype`.
    """
    if isinstance(data, GeneratedBatch):
        return dict(zip(keys, data.generate(keys, None, dtype, device)))
    # broadcast the shapes, filled up with -1
    padded_shapes = torch.full((len(keys), _MAX_DIMS), -1, dtype=torch.int64)
    if axis.is_first:
        wrong_dtypes = {key: data[key].dtype for key in keys if data[key].dtype != dtype}
        if wrong_dtypes:
            raise TypeError(f"the batch has the dtypes {wrong_dtypes} instead of {dtype}; convert it")
        for row, key in zip(padded_shapes, keys):
            row[: data[key].dim()] = torch.tensor(data[key].shape)
    if axis.size > 1:
        padded_shapes = collectives.broadcast(padded_shapes.to(device), axis)
    shapes = [torch.Size(n for n in row if n >= 0) for row in padded_shapes.tolist()]

    # broadcast the values, all tensors in one
    numels = [shape.numel() for shape in shapes]
    packed = None
    if axis.is_first:
        packed = {"all": torch.cat([to_device(data[key].reshape(-1), device) for key in keys])}
    (flat,) = broadcast_batch(["all"], packed, dtype, (sum(numels),), axis, device)
    return {key: part.view(shape) for key, part, shape in zip(keys, flat.split(numels), shapes)}
