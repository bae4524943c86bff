"""Stores for offloaded state: an `OffloadAllocator` in host memory, or in a file.

    stored = store.zeros(1000, torch.float32)     a Tensor, or a FileTensor with the same interface
    (`offload/tensor_in_memory_or_file.py`)

Reads and writes of a file run on the store's own thread, in the order in which they are started.
"""

import weakref
from concurrent.futures import Future, ThreadPoolExecutor
from math import prod
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from megatron.core.base.async_handle import AsyncHandle, done
from megatron.core.base.label_allocations_by_memory_kind import memory_kind
from megatron.core.offload.checksummed_file import BLOCK, BlockFile, OffloadError
from megatron.core.offload.offload_folder import STATE_FILE, RankFolder
from megatron.core.offload.optimizer_and_param_offload_config import OffloadConfig
from megatron.core.offload.tensor_in_memory_or_file import Stored, StoredTensor
from megatron.core.parallel.accelerator import is_accelerator, start_to_host


class FileTensor(StoredTensor):
    """A tensor, or a range of its rows, in a store's file."""

    def __init__(self, store: "FileOffloadStore", start: int, shape: tuple[int, ...], dtype: torch.dtype):
        """start: its first byte in the file."""
        self.shape = tuple(shape)
        self.dtype = dtype
        self._store = store
        self._start = start

    def view(self, shape: tuple[int, ...]) -> "FileTensor":
        """Return the same elements in another shape, of as many elements."""
        assert prod(shape) == self.numel(), f"{self.shape} as {shape}"
        return FileTensor(self._store, self._start, shape, self.dtype)

    def __getitem__(self, rows: slice) -> "FileTensor":
        """Return consecutive rows of the first dimension, as a view: [rows, ..]."""
        assert rows.step in (None, 1), f"every {rows.step}th row"
        start, stop = rows.indices(self.shape[0])[:2]
        row_bytes = prod(self.shape[1:]) * self.dtype.itemsize
        shape = (max(stop - start, 0), *self.shape[1:])
        return FileTensor(self._store, self._start + start * row_bytes, shape, self.dtype)

    def start_reading(self) -> AsyncHandle[Tensor]:
        """Start to read the values; `wait` returns them in new host memory [shape], or raises OffloadError."""
        if not self.numel():
            return done(torch.empty(self.shape, dtype=self.dtype))
        reading = self._store.start_read(self._start, self.nbytes)
        return AsyncHandle(lambda: reading.result().view(self.dtype).view(self.shape))

    def start_writing(self, values: Tensor) -> AsyncHandle[Any]:
        """Start to write `values` [shape], on any device and in any dtype; `wait` raises OffloadError if that fails."""
        if not self.numel():
            return done()
        host_copy = start_to_host(values.detach().to(self.dtype).contiguous())
        return AsyncHandle(self._store.start_write(self._start, host_copy).result)


class AcceleratorCopyStream:
    """Copies between host and device on a side stream of an accelerator, beside its computation.

    Memory is allocated and freed on the compute stream, which waits for the copy first. If the allocator had to track
    its use on the side stream, it would be freed only when the host next polls.
    """

    def __init__(self, device: torch.device):
        self._module = torch.get_device_module(device)
        self._device = device
        self._stream = self._module.Stream(device)

    def start_copy(self, target: Tensor, source: Tensor) -> AsyncHandle[Tensor]:
        """Start to copy `source` into `target`, of the same shape; `wait` returns `target`.

        `wait` blocks the compute stream, not the host.
        """
        # The side stream may read `source` and write `target` only after the kernels that are using them.
        self._stream.wait_stream(self._module.current_stream(self._device))
        with self._module.stream(self._stream):
            target.copy_(source, non_blocking=True)
            copied = self._stream.record_event()

        def wait_on_compute_stream() -> Tensor:
            self._module.current_stream(self._device).wait_event(copied)
            return target

        return AsyncHandle(wait_on_compute_stream, source)  # `source` stays alive until then


class OffloadAllocator(Protocol):
    """A place for offloaded tensors. name: "host" or "file"."""

    name: str

    def zeros(self, numel: int, dtype: torch.dtype) -> Stored:
        """Return a new tensor of zeros [numel]. Raises OffloadError if there is no room for it."""

    def side_stream(self, device: torch.device) -> AcceleratorCopyStream | None:
        """Return what copies between the device and the store's memory.

        None if `start_reading` and `start_writing` do.
        """

    def close(self) -> None:
        """Give everything back."""


class HostOffloadStore:
    """Host memory, pinned if the device is an accelerator."""

    name = "host"

    def __init__(self, device: torch.device):
        self._pinned = device.type != "cpu"

    def zeros(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Return a new tensor of zeros [numel] in host memory. Raises OffloadError if there is no room for it."""
        try:
            return torch.zeros(numel, dtype=dtype, pin_memory=self._pinned)
        except RuntimeError as error:
            kind = "pinned memory" if self._pinned else "memory"
            limit = ", raise ulimit -l" if self._pinned else ""
            raise OffloadError(
                f"cannot allocate {numel * dtype.itemsize:,} bytes of host {kind} ({str(error).splitlines()[0]}){limit}; give "
                "--offload-dir, more data-parallel ranks with a higher --zero-stage, or a lower --optimizer-offload-fraction"
            ) from error

    def side_stream(self, device: torch.device) -> AcceleratorCopyStream | None:
        return AcceleratorCopyStream(device) if is_accelerator(device) else None

    def close(self) -> None:
        """Do nothing: the memory is freed with the tensors."""


class FileOffloadStore:
    """A file in this rank's own folder, which `close` removes, or the end of the process unless it is killed."""

    name = "file"

    def __init__(self, root: Path | str, rank: int, block: int = BLOCK, *, pinned: bool = False):
        """pinned: read into pinned memory."""
        self._pinned = pinned
        self.folder = RankFolder(root, rank)
        self._file = BlockFile(self.folder.path / STATE_FILE, block)
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="offload")
        self._finalizer = weakref.finalize(self, _close, self._worker, self._file, self.folder)

    def zeros(self, numel: int, dtype: torch.dtype) -> FileTensor:
        """Return a new tensor of zeros [numel] in the file. Raises OffloadError if the disk has no room for it."""
        return FileTensor(self, self._file.extend(numel * dtype.itemsize), (numel,), dtype)

    def side_stream(self, device: torch.device) -> None:
        return None

    def close(self) -> None:
        self._finalizer()

    @memory_kind("slices")
    def start_read(self, start: int, nbytes: int) -> "Future[Tensor]":
        """Start to read bytes; the result is a uint8 tensor [nbytes], or an OffloadError is raised."""
        # whole blocks, from `first` to `last`, as their checksums need them
        block = self._file.block
        first = start // block * block
        last = -(-(start + nbytes) // block) * block
        data = torch.empty(last - first, dtype=torch.uint8, pin_memory=self._pinned)  # [bytes of the blocks]
        return self._worker.submit(self._read, first, data, slice(start - first, start - first + nbytes))

    def start_write(self, start: int, values: AsyncHandle[Tensor]) -> "Future[None]":
        """Start to write from byte `start` on; the result raises OffloadError if that fails.

        values: a copy to host memory in flight, of any shape and dtype, which must not change before the write is done.
        """
        return self._worker.submit(self._write, start, values)

    def _read(self, first: int, data: Tensor, wanted: slice) -> Tensor:
        self._file.read(first, memoryview(data.numpy()))
        return data[wanted]

    def _write(self, start: int, values: AsyncHandle[Tensor]) -> None:
        self._file.write(start, memoryview(values.wait().view(-1).view(torch.uint8).numpy()))


def _close(worker: ThreadPoolExecutor, file: BlockFile, folder: RankFolder) -> None:
    worker.shutdown(cancel_futures=True)
    file.close()
    folder.remove()


def make_offload_store(
    config: OffloadConfig, rank: int, device: torch.device, block: int = BLOCK
) -> OffloadAllocator | None:
    """Return the store for these settings; None without offload. Raises ConfigError if its folder cannot be used."""
    if config.tier == "file":
        return FileOffloadStore(config.offload_dir, rank, block, pinned=device.type != "cpu")
    if config.tier == "host":
        return HostOffloadStore(device)
    return None
