"""Write a model of another project as a checkpoint of ours while it is read: two bounded buffers of memory.

A tensor that the other project stores transposed is read in full: each contiguous run of ours would read all of it.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from math import isfinite, prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.convert.missing_params_and_absent_heads import check_complete, with_hf_names
from megatron.convert.strided_reads_of_foreign_files import StridedCheckpoint, keeps_order
from megatron.core.base.async_handle import AsyncHandle, done
from megatron.core.base.dataclass_flags import ConfigError
from megatron.core.dist_checkpointing import LocalTensor, save_checkpoint
from megatron.core.dist_checkpointing.manifest_format import BUFFER
from megatron.core.offload.tensor_in_memory_or_file import StoredTensor
from megatron.core.parallel.rank_grid import ALONE
from megatron.core.sharding.boxes import Box, flat_range_to_boxes, size_of, whole
from megatron.core.storage.file_layer import exists
from megatron.core.storage.path_or_url import path_of


def copy_checkpoint(
    checkpoint: StridedCheckpoint,
    root: Path | str,
    dtype: str | None = None,
    *,
    allow_missing: bool = False,
    note: Callable[[str], object] = lambda line: None,
) -> Path:
    """Write the weights below `root`, which must not exist, as an iteration that any layout loads; return its folder.

    One process calls. dtype: of all floating tensors; default: unchanged. The checkpoint's state names the model, and
    says that it has no optimizer state. allow_missing: write a model that lacks tensors, without them; note: called
    with a line about each, and about each tensor with NaN or infinite numbers, which are written as they are. Raises
    ConfigError, CheckpointError.
    """
    if exists(path_of(root)):
        raise ConfigError(f"{root} exists already; give a folder that does not exist")
    records = checkpoint.manifest.tensors
    check_complete(checkpoint.state, records, str(checkpoint.folder), allow=allow_missing, note=note)
    tensors = {}
    not_finite: Counter[str] = Counter()
    for name, record in records.items():
        box = whole(record.shape)
        is_buffer = name.startswith(BUFFER)  # which keeps its dtype
        values = _LazyTensor(checkpoint, name, record.dtype if is_buffer else dtype or record.dtype, not_finite)
        tensors[name] = LocalTensor(values, record.shape, [(box, box)], True)
    folder = save_checkpoint(root, checkpoint.iteration, tensors, checkpoint.state, ALONE)
    for name, count in sorted(not_finite.items()):
        param = with_hf_names(checkpoint.state, name.removeprefix("model/"))
        note(
            f"WARNING: {checkpoint.folder}: {param} has {count} NaN or infinite numbers of {prod(records[name].shape)}"
        )
    return folder


class _LazyTensor(StoredTensor):
    """A contiguous part of a checkpoint's tensor, which is read from the file when its values are requested."""

    def __init__(
        self,
        checkpoint: StridedCheckpoint,
        name: str,
        dtype: str,
        not_finite: Counter[str],
        shape: tuple[int, ...] | None = None,
        start: int = 0,
    ):
        """shape: of the part; default: the full tensor. start: its first element, in elements of the full tensor.

        not_finite: gets the number of NaN and infinite elements that are read, by name.
        """
        self.checkpoint = checkpoint
        self.name = name
        self.full_shape = checkpoint.manifest.tensors[name].shape
        self.shape = self.full_shape if shape is None else shape
        self.start = start
        self.dtype = getattr(torch, dtype)
        self.not_finite = not_finite

    def _part(self, shape: tuple[int, ...], start: int) -> "_LazyTensor":
        return _LazyTensor(
            self.checkpoint, self.name, str(self.dtype).removeprefix("torch."), self.not_finite, shape, start
        )

    def view(self, shape: tuple[int, ...]) -> "_LazyTensor":
        """Return the same elements in another shape, of as many elements."""
        return self._part(shape, self.start)

    def __getitem__(self, rows: slice) -> "_LazyTensor":
        """Return consecutive rows of the first dimension, as a view: [rows, ..]."""
        start, stop = rows.indices(self.shape[0])[:2]
        row_numel = prod(self.shape[1:])
        return self._part((stop - start, *self.shape[1:]), self.start + start * row_numel)

    def parts(self, nbytes: int = 4 << 20) -> Iterator[StoredTensor]:
        """Yield the elements in order, in flat runs [elements] of at most `nbytes` bytes.

        A tensor that the file has in another order is one run.
        """
        if keeps_order(self.checkpoint.manifest.tensors[self.name]):
            return super().parts(nbytes)
        return iter([self.view((self.numel(),))])

    def start_reading(self) -> AsyncHandle[Tensor]:
        """Read the values, [*shape], at once: the returned handle is complete."""
        values = torch.empty(self.numel(), dtype=self.dtype)
        # The part is a run of elements of the full tensor: one or more boxes of it, one after the other in `values`.
        pairs: list[tuple[Box, Box]] = []
        first = 0
        for box in flat_range_to_boxes(self.start, self.start + self.numel(), self.full_shape):
            count = prod(size_of(box))
            pairs.append((box, ((first, first + count),)))
            first += count
        self.checkpoint.read_into({self.name: LocalTensor(values, self.full_shape, pairs, False)}, convert=True)
        # aminmax is one pass over a buffer that is in the caches; a NaN anywhere makes both NaN
        if values.numel() and values.is_floating_point() and not all(map(isfinite, torch.aminmax(values))):
            self.not_finite[self.name] += int((~values.isfinite()).sum())
        return done(values.view(self.shape))

    def start_writing(self, values: Tensor) -> AsyncHandle[Any]:
        """Raise TypeError: the checkpoint is read only."""
        raise TypeError(f"{self.name} of {self.checkpoint.folder} is read-only")
