"""One interface to tensors in memory and tensors in files.

stored[100:200].view((10, 10))                     a view of either
values = start_reading(stored[100:200]).wait()     a Tensor; a file is read asynchronously between the two calls
start_writing(stored[100:200], values).wait()      start_writing returns at once, `wait` after the write
"""

from collections.abc import Iterator
from math import prod
from typing import Any

import torch
from torch import Tensor

from megatron.core.base.async_handle import AsyncHandle, done
from megatron.core.sharding.boxes import Box, rows_to_flat_range, size_of, slices, whole

_CHUNK = 4 << 20  # bytes in memory at a time while a whole tensor is copied


class StoredTensor:
    """A dense tensor whose values are read on demand, with the part of torch's interface that its callers use."""

    layout = torch.strided
    shape: tuple[int, ...]
    dtype: torch.dtype

    def view(self, shape: tuple[int, ...]) -> "StoredTensor":
        """Return the same elements in another shape, of as many elements."""
        raise NotImplementedError

    def __getitem__(self, rows: slice) -> "StoredTensor":
        """Return consecutive rows of the first dimension, as a view: [rows, ..]."""
        raise NotImplementedError

    def start_reading(self) -> AsyncHandle[Tensor]:
        """Start to read the values into new memory; `wait` returns them [shape]."""
        raise NotImplementedError

    def start_writing(self, values: Tensor) -> AsyncHandle[Any]:
        """Start to write `values` [shape], which must not change before `wait`."""
        raise NotImplementedError

    @property
    def nbytes(self) -> int:
        return self.numel() * self.dtype.itemsize

    def numel(self) -> int:
        return prod(self.shape)

    def is_contiguous(self) -> bool:
        return True

    def box(self, box: Box) -> "StoredTensor":
        """Return the view of a box of whole rows [shape of the box]."""
        start, stop = rows_to_flat_range(box, self.shape)
        flat = self.view((self.numel(),))  # [elements]
        return flat[start:stop].view(size_of(box))

    def parts(self, nbytes: int = _CHUNK) -> Iterator["StoredTensor"]:
        """Yield the elements in order, in flat runs [elements] of at most `nbytes` bytes."""
        flat = self.view((self.numel(),))  # [elements]
        length = max(nbytes // self.dtype.itemsize, 1)
        for start in range(0, self.numel(), length):
            yield flat[start : start + length]

    def put(self, box: Box, values: Tensor) -> None:
        """Write `values` [shape of the box] to any box.

        Takes memory for all rows of the box: partial rows are read first.
        """
        if not box:  # a tensor without dimensions
            self.start_writing(values).wait()
            return
        rows = self[slice(*box[0])]
        box_in_rows = ((0, len(values)), *box[1:])
        if box_in_rows != whole(rows.shape):
            row_values = rows.start_reading().wait()  # [rows, ...]
            row_values[slices(box_in_rows)] = values.to(self.dtype)
            values = row_values
        rows.start_writing(values).wait()


Stored = Tensor | StoredTensor


def start_reading(stored: Stored) -> AsyncHandle[Tensor]:
    """Start to read the values; `wait` returns them [shape of stored].

    Of a tensor in memory it returns the tensor itself, of one in a file a copy.
    """
    if isinstance(stored, Tensor):
        return done(stored)
    return stored.start_reading()


def start_writing(stored: Stored, values: Tensor) -> AsyncHandle[Any]:
    """Start to write `values` [shape of stored] in the dtype of `stored`; they must not change before `wait`."""
    if not isinstance(stored, Tensor):
        return stored.start_writing(values)
    if values.device.type == "cpu" and stored.device.type != "cpu":
        # by way of pinned memory, so that the host does not wait for the copy
        pinned = torch.empty(values.shape, dtype=stored.dtype, pin_memory=True).copy_(values)
        stored.copy_(pinned, non_blocking=True)
    elif values.data_ptr() != stored.data_ptr():
        stored.copy_(values.to(stored.dtype))  # converts before the transfer, which then moves half the bytes
    return done()


def read_parts(stored: Stored) -> Iterator[Tensor]:
    """Yield the elements in order: a tensor as it is, [shape], a file in flat parts, [elements].

    One part of a file at a time is in memory.
    """
    if isinstance(stored, Tensor):
        yield stored
        return
    for part in stored.parts():
        yield start_reading(part).wait()


def copy_stored(target: Stored, source: Stored) -> None:
    """Copy `source` to `target`, of one shape, in memory or in files.

    If either is in a file, both must be flat, [elements]; they are copied in small chunks.
    """
    if isinstance(target, Tensor) and isinstance(source, Tensor):
        target.copy_(source)
        return
    length = max(_CHUNK // 8, 1)
    for start in range(0, source.numel(), length):
        values = start_reading(source[start : start + length]).wait()
        start_writing(target[start : start + length], values).wait()
