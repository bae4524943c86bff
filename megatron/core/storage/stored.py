"""One interface to a tensor in memory and to one whose values are made when they are asked for.

stored[100:200].view((10, 10))                           a view, of either
values = start_reading(stored[100:200]).wait()               a Tensor; a file is read between the two calls
start_writing(stored[100:200], values).wait()                the first call returns at once, the second when it is written
"""

from collections.abc import Iterator
from math import prod
from typing import Any

import torch
from torch import Tensor

from megatron.core.boxes import Box, flat_run, size_of, slices, whole
from megatron.core.pending import Pending, done

_CHUNK = 4 << 20  # bytes that go through memory at a time when whole tensors are copied


class StoredTensor:
    """A dense tensor whose values are made when they are asked for: as much of torch's interface as its users need."""

    layout = torch.strided
    shape: tuple[int, ...]
    dtype: torch.dtype

    def view(self, shape: tuple[int, ...]) -> "StoredTensor":
        raise NotImplementedError

    def __getitem__(self, rows: slice) -> "StoredTensor":
        """Rows of the first dimension."""
        raise NotImplementedError

    def start_reading(self) -> Pending[Tensor]:
        """Begin to read values into memory of their own."""
        raise NotImplementedError

    def start_writing(self, values: Tensor) -> Pending[Any]:
        """Begin to write `values`, which may not change until it is done."""
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
        start, stop = flat_run(box, self.shape)
        return self.view((self.numel(),))[start:stop].view(size_of(box))

    def parts(self, nbytes: int = _CHUNK) -> Iterator["StoredTensor"]:
        """Its elements in order, in flat runs of at most so many bytes."""
        flat, length = self.view((self.numel(),)), max(nbytes // self.dtype.itemsize, 1)
        for at in range(0, self.numel(), length):
            yield flat[at : at + length]

    def put(self, box: Box, values: Tensor) -> None:
        """Set the elements of a box of any kind. Needs memory for the rows that it lies in."""
        rows = self[slice(*box[0])] if box else self
        inside = ((0, len(values)), *box[1:]) if box else ()
        if inside == whole(rows.shape):
            new = values
        else:
            new = rows.start_reading().wait()
            new[slices(inside)] = values.to(self.dtype)
        rows.start_writing(new).wait()


Stored = Tensor | StoredTensor


def start_reading(stored: Stored) -> Pending[Tensor]:
    """Begin to read the values: a tensor itself, of all else a copy."""
    return done(stored) if isinstance(stored, Tensor) else stored.start_reading()


def start_writing(stored: Stored, values: Tensor) -> Pending[Any]:
    """Begin to write `values`, which may not change until it is done, in the dtype stored."""
    if not isinstance(stored, Tensor):
        return stored.start_writing(values)
    if values.device.type == "cpu" and stored.device.type != "cpu":  # the host does not wait
        stored.copy_(torch.empty(values.shape, dtype=stored.dtype, pin_memory=True).copy_(values), non_blocking=True)
    elif values.data_ptr() != stored.data_ptr():
        stored.copy_(values.to(stored.dtype))  # converted where the values are: half the bytes travel
    return done()


def loaded(stored: Stored) -> Iterator[Tensor]:
    """The elements in order: a tensor as it is, all else in flat parts, one at a time in memory."""
    if isinstance(stored, Tensor):
        yield stored
        return
    for part in stored.parts():
        yield start_reading(part).wait()


def copy_stored(target: Stored, source: Stored) -> None:
    """Set the elements of one flat run to another's; where one of them is no tensor, through little memory."""
    if isinstance(target, Tensor) and isinstance(source, Tensor):
        target.copy_(source)
        return
    length = max(_CHUNK // 8, 1)
    for at in range(0, source.numel(), length):
        start_writing(target[at : at + length], start_reading(source[at : at + length]).wait()).wait()
