"""A file that is read and written by byte ranges, with a checksum per block in memory. No torch.

    | block 0 | block 1 | block 2 |     a range that covers part of a block reads the whole block to check it;
         |-- range --|                  writing part of a block reads and writes the whole block

The checksums (CRC-32: it detects any wrong byte and any burst of up to 32 bits) stay in memory, 4 bytes per block: no
other process uses the file, and a checksum beside the data would not detect a lost write.
"""

import os
import zlib
from array import array
from pathlib import Path

BLOCK = 1 << 20  # bytes: large enough for the disk's throughput, as each block costs a system call


class OffloadError(RuntimeError):
    """Offloaded state cannot be read or written: the file, the problem, what to do."""


_DAMAGED = (
    "the disk fails, or another program writes to the file; resume from the last checkpoint with another --offload-dir"
)


class BlockFile:
    """A file of zeros that grows by `extend`. Not thread-safe."""

    def __init__(self, path: Path, block: int = BLOCK):
        self.path = path
        self.block = block
        self._zeros_sum = zlib.crc32(bytes(block))
        self._sums = array("I")  # of each block
        self._handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)

    @property
    def nbytes(self) -> int:
        """The bytes reserved so far."""
        return len(self._sums) * self.block

    def extend(self, nbytes: int) -> int:
        """Reserve `nbytes` of zeros on the disk now; return their start. Raises OffloadError."""
        start = self.nbytes
        blocks = -(-nbytes // self.block)
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
        """Read whole blocks from byte `start` into `out`, and check them. Raises OffloadError."""
        assert start % self.block == 0 and len(out) % self.block == 0, f"bytes {start} .. {start + len(out)}"
        self._read_all(start, out)
        first = start // self.block
        for i in range(len(out) // self.block):
            block = out[i * self.block : (i + 1) * self.block]
            if zlib.crc32(block) != self._sums[first + i]:
                block_start = (first + i) * self.block
                where = f"bytes {block_start} .. {block_start + self.block}"
                raise OffloadError(f"{self.path}: {where} differ from what was written; {_DAMAGED}")

    def write(self, start: int, data: memoryview) -> None:
        """Write `data` at byte `start`, which need not begin a block. Raises OffloadError."""
        position = start
        end = start + len(data)
        assert end <= self.nbytes, f"bytes {start} .. {end} of {self.nbytes}"
        while position < end:
            # the part of the data in this block
            number, offset = divmod(position, self.block)
            stop = min(end, (number + 1) * self.block)
            part = data[position - start : stop - start]
            if len(part) < self.block:  # read the rest of the block, for its checksum
                block = bytearray(self.block)
                self.read(number * self.block, memoryview(block))
                block[offset : offset + len(part)] = part
                part = memoryview(block)
            self._write_all(number * self.block, part)
            self._sums[number] = zlib.crc32(part)
            position = stop

    def close(self) -> None:
        """Close the file."""
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1

    def _read_all(self, start: int, out: memoryview) -> None:
        done = 0
        try:
            while done < len(out):
                count = os.preadv(self._handle, [out[done:]], start + done)
                if not count:
                    break
                done += count
        except OSError as error:
            where = f"at byte {start + done} ({error.strerror})"
            raise OffloadError(f"{self.path}: unreadable {where}; {_DAMAGED}") from error
        if done < len(out):
            raise OffloadError(
                f"{self.path}: ends at byte {start + done}, but {self.nbytes} bytes were written; {_DAMAGED}"
            )

    def _write_all(self, start: int, data: memoryview) -> None:
        done = 0
        try:
            while done < len(data):
                done += os.pwrite(self._handle, data[done:], start + done)
        except OSError as error:
            raise OffloadError(
                f"{self.path}: cannot be written at byte {start + done} ({error.strerror}); free the disk, or resume from the "
                "last checkpoint with another --offload-dir"
            ) from error
