"""A file that is read and written by byte ranges, with a checksum per block in memory. No torch.

    | block 0 | block 1 | block 2 |     a range that covers part of a block reads the whole block to check it;
         |-- range --|                  writing part of a block reads and writes the whole block

The checksums (CRC-32: detects any wrong byte and any burst of up to 32 bits) stay in memory, 4 bytes per block: no other
process
uses the file, and a checksum beside the data would not detect a lost write.
"""

import os
import zlib
from array import array
from pathlib import Path

BLOCK = 1 << 20  # bytes: large enough for disk throughput; each block costs a system call


class OffloadError(RuntimeError):
    """Offloaded state cannot be read or written: the file, the problem, the remedy."""


_DAMAGED = "the disk fails or another program writes there; resume from the last checkpoint with another --offload-dir"


class BlockFile:
    """A file of zeros that grows by `extend`. Not thread-safe."""

    def __init__(self, path: Path, block: int = BLOCK):
        self.path, self.block = path, block
        self._zeros_sum = zlib.crc32(bytes(block))
        self._sums = array("I")
        self._handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)

    @property
    def nbytes(self) -> int:
        return len(self._sums) * self.block

    def extend(self, nbytes: int) -> int:
        """Reserves `nbytes` of zeros on the disk now; returns their start."""
        start, blocks = self.nbytes, -(-nbytes // self.block)
        if blocks:
            try:
                os.posix_fallocate(self._handle, start, blocks * self.block)
            except OSError as error:
                raise OffloadError(
                    f"{self.path}: no room for another {nbytes:,} bytes ({error.strerror}); free the disk, give another "
                    "--offload-dir, more data-parallel ranks with a higher --zero-stage, or a lower "
                    "--optimizer-offload-fraction"
                ) from error
            self._sums.extend([self._zeros_sum] * blocks)
        return start

    def read(self, start: int, out: memoryview) -> None:
        """Reads whole blocks from byte `start` into `out`, and checks them. Raises OffloadError."""
        assert start % self.block == 0 and len(out) % self.block == 0, f"bytes {start} .. {start + len(out)}"
        self._fill(start, out)
        first = start // self.block
        for i in range(len(out) // self.block):
            if zlib.crc32(out[i * self.block : (i + 1) * self.block]) != self._sums[first + i]:
                at = (first + i) * self.block
                where = f"bytes {at} .. {at + self.block}"
                raise OffloadError(f"{self.path}: {where} differ from those written; {_DAMAGED}")

    def write(self, start: int, data: memoryview) -> None:
        """Writes `data` at byte `start`, which need not begin a block. Raises OffloadError."""
        at, end = start, start + len(data)
        assert end <= self.nbytes, f"bytes {start} .. {end} of {self.nbytes}"
        while at < end:
            number, inside = divmod(at, self.block)
            stop = min(end, (number + 1) * self.block)
            part = data[at - start : stop - start]
            if len(part) < self.block:
                whole = bytearray(self.block)
                self.read(number * self.block, memoryview(whole))
                whole[inside : inside + len(part)] = part
                part = memoryview(whole)
            self._put(number * self.block, part)
            self._sums[number] = zlib.crc32(part)
            at = stop

    def close(self) -> None:
        """Closes the file."""
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1

    def _fill(self, start: int, out: memoryview) -> None:
        done = 0
        try:
            while done < len(out) and (count := os.preadv(self._handle, [out[done:]], start + done)):
                done += count
        except OSError as error:
            at = f"at byte {start + done} ({error.strerror})"
            raise OffloadError(f"{self.path}: unreadable {at}; {_DAMAGED}") from error
        if done < len(out):
            raise OffloadError(f"{self.path}: ends at byte {start + done}, but {self.nbytes} were written; {_DAMAGED}")

    def _put(self, start: int, data: memoryview) -> None:
        done = 0
        try:
            while done < len(data):
                done += os.pwrite(self._handle, data[done:], start + done)
        except OSError as error:
            raise OffloadError(
                f"{self.path}: cannot be written at byte {start + done} ({error.strerror}); free the disk, or resume from the "
                "last checkpoint with another --offload-dir"
            ) from error
