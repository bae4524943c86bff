"""A model of another project as a checkpoint of ours, written while it is read: two bounded buffers of memory.

A tensor that theirs holds transposed is read as a whole: each run of ours would read all of it.
"""

from collections.abc import Callable, Iterator
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.convert.check_missing_keys import check_complete
from megatron.convert.strided_checkpoint import StridedCheckpoint, lies_in_order
from megatron.core.base.async_handle import AsyncHandle, done
from megatron.core.base.dataclass_flags import ConfigError
from megatron.core.dist_checkpointing import LocalTensor, save_checkpoint
from megatron.core.offload.stored_tensor import StoredTensor
from megatron.core.parallel.grid import ALONE
from megatron.core.sharding.boxes import Box, flat_range_to_boxes, size_of, whole
from megatron.core.storage.file_layer import exists
from megatron.core.storage.paths import path_of


def copy_checkpoint(
    checkpoint: StridedCheckpoint,
    root: Path | str,
    dtype: str | None = None,
    *,
    allow_missing: bool = False,
    note: Callable[[str], object] = lambda line: None,
) -> Path:
    """Write the weights below `root`, which must not exist, as an iteration that any layout loads; returns its folder.

    One process calls. dtype: of all floating tensors; default: as they are. The state says the model, and that no
    optimizer's state is there. allow_missing: writes a model that lacks tensors, without them; note: told of each. Raises
    ConfigError, CheckpointError.
    """
    if exists(path_of(root)):
        raise ConfigError(f"{root} is there already; a checkpoint is written anew: choose another folder")
    names = checkpoint.manifest.tensors
    check_complete(checkpoint.state, names, str(checkpoint.folder), allow=allow_missing, note=note)
    tensors = {}
    for name, record in checkpoint.manifest.tensors.items():
        box = whole(record.shape)
        tensors[name] = LocalTensor(
            _ReadInRuns(checkpoint, name, dtype or record.dtype), record.shape, [(box, box)], True
        )
    return save_checkpoint(root, checkpoint.iteration, tensors, checkpoint.state, ALONE)


class _ReadInRuns(StoredTensor):
    """A tensor of a checkpoint, of which each run of elements is read when it is asked for."""

    def __init__(
        self, checkpoint: StridedCheckpoint, name: str, dtype: str, shape: tuple[int, ...] | None = None, start: int = 0
    ):
        self.checkpoint, self.name = checkpoint, name
        self.whole_shape = checkpoint.manifest.tensors[name].shape
        self.shape, self.start = self.whole_shape if shape is None else shape, start  # start: in elements of the whole
        self.dtype = getattr(torch, dtype)

    def _at(self, shape: tuple[int, ...], start: int) -> "_ReadInRuns":
        return _ReadInRuns(self.checkpoint, self.name, str(self.dtype).removeprefix("torch."), shape, start)

    def view(self, shape: tuple[int, ...]) -> "_ReadInRuns":
        return self._at(shape, self.start)

    def __getitem__(self, rows: slice) -> "_ReadInRuns":
        start, stop = rows.indices(self.shape[0])[:2]
        return self._at((stop - start, *self.shape[1:]), self.start + start * prod(self.shape[1:]))

    def parts(self, nbytes: int = 4 << 20) -> Iterator[StoredTensor]:
        if lies_in_order(self.checkpoint.manifest.tensors[self.name]):
            return super().parts(nbytes)
        return iter([self.view((self.numel(),))])

    def start_reading(self) -> AsyncHandle[Tensor]:
        values = torch.empty(self.numel(), dtype=self.dtype)
        pairs: list[tuple[Box, Box]] = []
        at = 0
        for box in flat_range_to_boxes(self.start, self.start + self.numel(), self.whole_shape):
            count = prod(size_of(box))
            pairs.append((box, ((at, at + count),)))
            at += count
        self.checkpoint.read_into({self.name: LocalTensor(values, self.whole_shape, pairs, False)}, convert=True)
        return done(values.view(self.shape))

    def start_writing(self, values: Tensor) -> AsyncHandle[Any]:
        raise TypeError(f"{self.name} of {self.checkpoint.folder} is read only")
