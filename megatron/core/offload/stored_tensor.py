"""One interface to tensors in memory and tensors in files.

stored[100:200].view((10, 10))                     a view of either
values = start_reading(stored[100:200]).wait()     a Tensor; a file is read asynchronously between the two calls
start_writing(stored[100:200], values).wait()      start_writing returns at once, wait after the write
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
    """A dense tensor whose values are read on demand, with the part of torch's interface that its users need."""

    layout = torch.strided
    shape: tuple[int, ...]
    dtype: torch.dtype

    def view(self, shape: tuple[int, ...]) -> "StoredTensor":
        raise NotImplementedError

    def __getitem__(self, rows: slice) -> "StoredTensor":
        """Rows of the first dimension."""
        raise NotImplementedError

    def start_reading(self) -> AsyncHandle[Tensor]:
        """Starts to read the values into new memory."""
        raise NotImplementedError

    def start_writing(self, values: Tensor) -> AsyncHandle[Any]:
        """Starts to write `values`, which must not change before `wait`."""
        raise NotImplementedError

    @property
    def nbytes(self) -> int:
        return self.numel() * self.dtype.itemsize

    def numel(self) -> int:
        return prod(self.shape)

    def is_contiguous(self) -> bool:
        return True

    def box(self, box: Box) -> "StoredTensor":
        """A box of whole rows."""
        start, stop = rows_to_flat_range(box, self.shape)
        return self.view((self.numel(),))[start:stop].view(size_of(box))

    def parts(self, nbytes: int = _CHUNK) -> Iterator["StoredTensor"]:
        """The elements in order, in flat runs of at most `nbytes` bytes."""
        flat, length = self.view((self.numel(),)), max(nbytes // self.dtype.itemsize, 1)
        for at in range(0, self.numel(), length):
            yield flat[at : at + length]

    def put(self, box: Box, values: Tensor) -> None:
        """Writes `values` to any box. Takes memory for all rows that the box touches: partial rows are read first."""
        rows = self[slice(*box[0])] if box else self
        inside = ((0, len(values)), *box[1:]) if box else ()
        if inside == whole(rows.shape):
            new = values
        else:
            new = rows.start_reading().wait()
            new[slices(inside)] = values.to(self.dtype)
        rows.start_writing(new).wait()


Stored = Tensor | StoredTensor


def start_reading(stored: Stored) -> AsyncHandle[Tensor]:
    """Starts to read the values. A tensor is returned itself, a file as a copy."""
    return done(stored) if isinstance(stored, Tensor) else stored.start_reading()


def start_writing(stored: Stored, values: Tensor) -> AsyncHandle[Any]:
    """Starts to write `values` in the dtype of `stored`; they must not change before `wait`."""
    if not isinstance(stored, Tensor):
        return stored.start_writing(values)
    if values.device.type == "cpu" and stored.device.type != "cpu":  # the host does not wait
        stored.copy_(torch.empty(values.shape, dtype=stored.dtype, pin_memory=True).copy_(values), non_blocking=True)
    elif values.data_ptr() != stored.data_ptr():
        stored.copy_(values.to(stored.dtype))  # converts before the transfer, which then moves half the bytes
    return done()


def loaded(stored: Stored) -> Iterator[Tensor]:
    """The elements in order: a tensor as it is, a file in flat parts, one at a time in memory."""
    if isinstance(stored, Tensor):
        yield stored
        return
    for part in stored.parts():
        yield start_reading(part).wait()


def copy_stored(target: Stored, source: Stored) -> None:
    """Copies one flat run to another, in small chunks if one is in a file."""
    if isinstance(target, Tensor) and isinstance(source, Tensor):
        target.copy_(source)
        return
    length = max(_CHUNK // 8, 1)
    for at in range(0, source.numel(), length):
        start_writing(target[at : at + length], start_reading(source[at : at + length]).wait()).wait()
