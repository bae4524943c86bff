"""One interface to where state lives: device memory, host memory, or a file.

    stored = tier.zeros(1000, torch.float32, "exp_avg")      a Tensor, or a FileTensor that is used alike
    stored[100:200].view((10, 10))                           a view, in either
    values = start_reading(stored[100:200])()                a Tensor; the file is read between the two calls
    start_writing(stored[100:200], values)()                 the first call returns at once, the second when it is written

Reads and writes of one file happen in the order in which they were started, on a thread of the tier's own.
"""

import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from math import prod
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from megatron.core.boxes import Box, flat_run, size_of, slices, whole
from megatron.core.device import start_to_host
from megatron.core.offload.block_file import BLOCK, BlockFile, OffloadError
from megatron.core.offload.folder import STATE_FILE, RankFolder

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

    def start_reading(self) -> Callable[[], Tensor]:
        """Begin to read; the call that is returned waits, and gives the values in memory of their own."""
        raise NotImplementedError

    def start_writing(self, values: Tensor) -> Callable[[], None]:
        """Begin to write; `values` may not change before the call that is returned comes back."""
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
            new = rows.start_reading()()
            new[slices(inside)] = values.to(self.dtype)
        rows.start_writing(new)()


Stored = Tensor | StoredTensor


class FileTensor(StoredTensor):
    """A tensor, or a run of one, in a tier's file."""

    def __init__(self, tier: "FileTier", start: int, shape: tuple[int, ...], dtype: torch.dtype):
        """start: its first byte in the file."""
        self._tier, self._start, self.shape, self.dtype = tier, start, tuple(shape), dtype

    def view(self, shape: tuple[int, ...]) -> "FileTensor":
        assert prod(shape) == self.numel(), f"{self.shape} as {shape}"
        return FileTensor(self._tier, self._start, shape, self.dtype)

    def __getitem__(self, rows: slice) -> "FileTensor":
        start, stop, step = rows.indices(self.shape[0])
        assert step == 1, f"every {step}th row"
        row = prod(self.shape[1:]) * self.dtype.itemsize
        return FileTensor(self._tier, self._start + start * row, (max(stop - start, 0), *self.shape[1:]), self.dtype)

    def start_reading(self) -> Callable[[], Tensor]:
        if not self.numel():
            return lambda: torch.empty(self.shape, dtype=self.dtype)
        reading = self._tier.start_read(self._start, self.nbytes)
        return lambda: reading.result().view(self.dtype).view(self.shape)

    def start_writing(self, values: Tensor) -> Callable[[], None]:
        if not self.numel():
            return lambda: None
        return self._tier.start_write(self._start, start_to_host(values.detach().to(self.dtype).contiguous())).result


class Tier(Protocol):
    """Where tensors are made. name: "device", "host" or "file"."""

    name: str

    def zeros(self, numel: int, dtype: torch.dtype) -> Stored: ...

    def close(self) -> None: ...


class HostTier:
    """Memory of the host, that an accelerator can read itself (pinned) where there is one."""

    name = "host"

    def __init__(self, device: torch.device):
        self._pinned = device.type != "cpu"

    def zeros(self, numel: int, dtype: torch.dtype) -> Tensor:
        try:
            return torch.zeros(numel, dtype=dtype, pin_memory=self._pinned)
        except RuntimeError as error:
            kind, limit = ("pinned memory", ", raise ulimit -l") if self._pinned else ("memory", "")
            raise OffloadError(
                f"the host has no {numel * dtype.itemsize:,} bytes of {kind} ({str(error).splitlines()[0]}){limit}; give --offload-dir, more "
                "data-parallel ranks with a higher --zero-stage, or a lower --optimizer-offload-fraction"
            ) from error

    def close(self) -> None:
        """Memory goes with the tensors."""


class FileTier:
    """A file in a folder of this rank's own, which `close` removes; so does the end of the process, unless it is killed."""

    name = "file"

    def __init__(self, root: Path | str, rank: int, block: int = BLOCK, *, pinned: bool = False):
        """pinned: read into memory that an accelerator can read itself."""
        self._pinned = pinned
        self.folder = RankFolder(root, rank)
        self._file = BlockFile(self.folder.path / STATE_FILE, block)
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="offload")
        self._finalizer = weakref.finalize(self, _close, self._worker, self._file, self.folder)

    def zeros(self, numel: int, dtype: torch.dtype) -> FileTensor:
        return FileTensor(self, self._file.extend(numel * dtype.itemsize), (numel,), dtype)

    def close(self) -> None:
        self._finalizer()

    def start_read(self, start: int, nbytes: int) -> "Future[Tensor]":
        """Those bytes, as a tensor of bytes."""
        block = self._file.block
        first, last = start // block * block, -(-(start + nbytes) // block) * block
        data = torch.empty(last - first, dtype=torch.uint8, pin_memory=self._pinned)
        return self._worker.submit(self._read, first, data, slice(start - first, start - first + nbytes))

    def start_write(self, start: int, fetched: Callable[[], Tensor]) -> "Future[None]":
        """fetched() waits for the values in memory of the host, which may not change before they are written."""
        return self._worker.submit(self._write, start, fetched)

    def _read(self, first: int, data: Tensor, wanted: slice) -> Tensor:
        self._file.read(first, memoryview(data.numpy()))
        return data[wanted]

    def _write(self, start: int, fetched: Callable[[], Tensor]) -> None:
        self._file.write(start, memoryview(fetched().view(-1).view(torch.uint8).numpy()))


def _close(worker: ThreadPoolExecutor, file: BlockFile, folder: RankFolder) -> None:
    worker.shutdown(cancel_futures=True)
    file.close()
    folder.remove()


# ---------------------------------------------------------------- the same for all that is stored


def start_reading(stored: Stored) -> Callable[[], Tensor]:
    """Begin to read; the call that is returned waits, and gives the values: a tensor itself, of all else a copy."""
    return (lambda: stored) if isinstance(stored, Tensor) else stored.start_reading()


def start_writing(stored: Stored, values: Tensor) -> Callable[[], None]:
    """Begin to write, converting to the dtype stored; `values` may not change before the call that is returned comes back."""
    if not isinstance(stored, Tensor):
        return stored.start_writing(values)
    if values.device.type == "cpu" and stored.device.type != "cpu":  # the host does not wait
        stored.copy_(torch.empty(values.shape, dtype=stored.dtype, pin_memory=True).copy_(values), non_blocking=True)
    elif values.data_ptr() != stored.data_ptr():
        stored.copy_(values.to(stored.dtype))  # converted where the values are: half the bytes travel
    return lambda: None


def loaded(stored: Stored) -> Iterator[Tensor]:
    """The elements in order: a tensor as it is, all else in flat parts, one at a time in memory."""
    if isinstance(stored, Tensor):
        yield stored
        return
    for part in stored.parts():
        yield start_reading(part)()


def copy_stored(target: Stored, source: Stored) -> None:
    """Set the elements of one flat run to another's; where one of them is no tensor, through little memory."""
    if isinstance(target, Tensor) and isinstance(source, Tensor):
        target.copy_(source)
        return
    length = max(_CHUNK // 8, 1)
    for at in range(0, source.numel(), length):
        start_writing(target[at : at + length], start_reading(source[at : at + length])())()


__all__ = [
    "FileTensor",
    "FileTier",
    "HostTier",
    "OffloadError",
    "Stored",
    "StoredTensor",
    "Tier",
    "copy_stored",
    "loaded",
    "start_reading",
    "start_writing",
]
