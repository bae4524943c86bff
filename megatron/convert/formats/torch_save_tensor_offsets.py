"""Read a file of `torch.save`: the values of its pickle, and the position of each tensor. No torch; nothing is run.

    a zip (torch from 1.6 on)      archive/data.pkl, archive/data/0, archive/data/1, ...; records are never compressed
    before                         five pickles, then each storage after its number of elements

A file may be hostile: records must be disjoint and within the file, tensors row-major and within their records.
Zip format: https://pkware.cachefly.net/webdocs/casestudies/APPNOTE.TXT
"""

import math
import struct
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from megatron.convert.formats.pickle_as_data import (
    MOST_BYTES,
    GlobalName,
    PersistentId,
    PickledObject,
    PickleError,
    read_pickle,
)
from megatron.convert.formats.safetensors_header import FETCH_AGAIN, TensorInFile
from megatron.core.base.lfs_pointer import LFS_POINTER, is_lfs_pointer
from megatron.core.dist_checkpointing.manifest_format import ITEM_BYTES, CheckpointError
from megatron.core.storage.file_layer import backend_of, read_all

_HAS_DESCRIPTOR = 8  # flag of a zip record whose checksum and sizes follow its content, in a data descriptor
_STORAGES = {"Double": "float64", "Float": "float32", "Half": "float16", "BFloat16": "bfloat16", "Long": "int64"}
_STORAGES |= {"Int": "int32", "Byte": "uint8", "Bool": "bool"}
_DTYPES = {f"{kind}Storage": dtype for kind, dtype in _STORAGES.items()}
# signatures of a zip's parts
_RECORD = b"PK\x03\x04"
_DESCRIPTOR = b"PK\x07\x08"
_ENTRY = b"PK\x01\x02"  # of the directory
_END = b"PK\x05\x06"
_END_64 = b"PK\x06\x06"
_LOCATOR_64 = b"PK\x06\x07"
_MOST_DIRECTORY = 256 << 20  # bytes
_MOST_SIZE = 1 << 62  # bytes
_MAGIC = 0x1950A86A20F9469CFC6C  # of files before torch 1.6
_PROTOCOL = 1001  # of files before torch 1.6


class Span(NamedTuple):
    """Bytes `start` to `stop` (exclusive) of a file: all of it, or a file that another file contains."""

    start: int
    stop: int


@dataclass(frozen=True)
class TorchFile:
    """The values of a file, and the positions of its storages."""

    name: str
    values: Any  # of its pickle
    storages: Mapping[str, Span]

    def tensor(self, value: Any) -> TensorInFile | None:
        """Return the position of a value that is a tensor; None for other values.

        Raises PickleError for a tensor that is not row-major, beyond its storage, or of an unsupported dtype.
        """
        if not isinstance(value, PickledObject):
            return None
        arguments = value.arguments
        if value.is_a("torch._utils._rebuild_parameter", "torch._utils._rebuild_parameter_with_state"):
            return self.tensor(arguments[0]) if arguments else None
        if not value.is_a("torch._utils._rebuild_tensor", "torch._utils._rebuild_tensor_v2"):
            return None
        if len(arguments) < 4 or not isinstance(arguments[0], PersistentId):
            raise PickleError("has a tensor whose storage is missing")
        storage = _storage(arguments[0])
        start, shape, strides = arguments[1:4]  # start: in elements of the storage
        if not _are_counts([start]) or not isinstance(shape, tuple) or not _are_counts(shape):
            raise PickleError("has a tensor whose shape does not consist of numbers")
        if not isinstance(strides, tuple) or not _is_row_major(shape, strides):
            raise PickleError(
                f"has a tensor of shape {shape!r:.60} that is not contiguous: its strides are not row-major"
            )
        span = self.storages.get(storage.key)
        nbytes = storage.count * storage.item_bytes
        if span is None or nbytes != span.stop - span.start or start + math.prod(shape) > storage.count:
            raise PickleError(f"has a tensor of shape {shape!r:.60} that exceeds its storage {storage.key!r:.20}")
        return TensorInFile(self.name, storage.dtype, shape, span.start + start * storage.item_bytes)


def _are_counts(values: Any) -> bool:
    return len(values) <= 64 and all(type(value) is int and 0 <= value < _MOST_SIZE for value in values)


def _is_row_major(shape: tuple[int, ...], strides: tuple[Any, ...]) -> bool:
    """Return what `Tensor.is_contiguous` would: a dimension of size 1 may have any stride."""
    if len(strides) != len(shape) or not all(type(stride) is int for stride in strides):
        return False
    if 0 in shape:
        return True
    contiguous = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    return all(size == 1 or stride == expected for size, stride, expected in zip(shape, strides, contiguous))


class _Storage(NamedTuple):
    """A storage, as the pickle describes it."""

    key: str
    dtype: str
    count: int  # of elements

    @property
    def item_bytes(self) -> int:
        return ITEM_BYTES[self.dtype]


def _storage(persistent_id: PersistentId) -> _Storage:
    pid = persistent_id.pid  # ("storage", class, key, device, elements), and a view before 1.6
    if not isinstance(pid, tuple) or len(pid) not in (5, 6) or pid[0] != "storage":
        raise PickleError("has a tensor storage in an unknown form")
    kind, key = pid[1:3]
    if not isinstance(kind, GlobalName) or str(kind) not in {f"torch.{name}" for name in _DTYPES}:
        what = str(kind) if isinstance(kind, GlobalName) else "storage without a dtype"
        raise PickleError(f"has a {what:.60}, which cannot be read; only {', '.join(_DTYPES)} can be read")
    if not isinstance(key, str) or not _are_counts(pid[4:5]) or pid[5:] not in ((), (None,)):
        raise PickleError("has a tensor storage whose key or size is missing")
    return _Storage(key, _DTYPES[kind.name], pid[4])


# ---------------------------------------------------------------- files


def read_torch_file(path: Path, name: str, span: Span | None = None) -> TorchFile:
    """Read the values of a file, or of the part `span` of one; reads no tensors. name: of the file, in its tensors.

    Raises CheckpointError.
    """
    try:
        stat = backend_of(path).stat(path)
        size = stat.size if stat is not None and stat.is_file else 0
        span = span or Span(0, size)
        if not 0 <= span.start < span.stop <= size:
            raise PickleError(f"has {size} bytes, but its content should be at bytes {span.start} to {span.stop}")
        with backend_of(path).open(path, "rb") as file:
            window = _Window(file, path, span)
            if window.read(0, 4) == _RECORD:
                return _read_zip(window, name)
            return _read_before_1_6(window, name)
    except OSError as error:
        raise CheckpointError(path, f"cannot be read ({error.strerror})", "check the path and its rights") from error
    except (PickleError, struct.error) as error:
        raise CheckpointError(path, str(error)[:300], FETCH_AGAIN) from error


class _Window(NamedTuple):
    """The part of a file that is read; positions count from its start."""

    file: BinaryIO
    path: Path
    span: Span

    @property
    def size(self) -> int:
        return self.span.stop - self.span.start

    def read(self, start: int, count: int) -> bytes:
        if start < 0 or count < 0 or start + count > self.size:
            raise PickleError(f"has {self.size} bytes, but its content should be at bytes {start} to {start + count}")
        buffer = bytearray(count)
        self.file.seek(self.span.start + start)
        if read_all(self.file, memoryview(buffer), self.path) < count:
            raise PickleError("ends earlier than its size says")
        return bytes(buffer)


def _read_zip(window: _Window, name: str) -> TorchFile:
    """Read a file of torch from 1.6 on."""
    records = _records(window)
    pickles = [key for key in records if key.count("/") == 1 and key.endswith("/data.pkl")]
    if len(pickles) != 1:
        raise PickleError("is a zip file without data.pkl, which torch.save always writes")
    archive = pickles[0].removesuffix("data.pkl")
    byte_order = _content(window, records, f"{archive}byteorder", b"little")
    if byte_order != b"little":
        raise PickleError(f"has byte order {byte_order[:10]!r}; only little can be read")
    values, _ = read_pickle(_content(window, records, pickles[0]))
    storages = {}
    for key, record in records.items():
        if key.startswith(f"{archive}data/"):
            start, stop = record.content_span(window, key)
            storages[key.removeprefix(f"{archive}data/")] = Span(window.span.start + start, window.span.start + stop)
    return TorchFile(name, values, storages)


class _Entry(NamedTuple):
    """A record, as the directory of a zip describes it."""

    header: int  # where the record begins
    nbytes: int  # of its content
    crc: int
    flags: int
    end: int = 0  # where the next record, or the directory, begins

    def content_span(self, window: _Window, name: str) -> Span:
        """Return where the record's content is. Raises PickleError if the record does not match the directory."""
        header = window.read(self.header, 30)
        name_bytes, extra_bytes = struct.unpack("<HH", header[26:])
        start = self.header + 30 + name_bytes + extra_bytes
        (flags,) = struct.unpack("<H", header[6:8])
        matches = (
            header[:4] == _RECORD and flags == self.flags and window.read(self.header + 30, name_bytes) == name.encode()
        )
        if not matches or not self._ends_after(window, start + self.nbytes):
            raise PickleError(f"has no record {name!r:.60} at the position that the zip directory says")
        return Span(start, start + self.nbytes)

    def _ends_after(self, window: _Window, stop: int) -> bool:
        """Return whether a content that ends at `stop` is followed by its data descriptor, if any, and nothing else.

        Without this check, changed lengths in the header would move the content by as many bytes.
        """
        if not self.flags & _HAS_DESCRIPTOR:
            return stop == self.end
        if self.end - stop == 16:
            form, bits_of_size = "<4sIII", 32
        elif self.end - stop == 24:
            form, bits_of_size = "<4sIQQ", 64
        else:
            return False
        if self.nbytes >> bits_of_size:
            return False
        descriptor = struct.pack(form, _DESCRIPTOR, self.crc, self.nbytes, self.nbytes)
        return window.read(stop, self.end - stop) == descriptor


def _content(window: _Window, records: Mapping[str, _Entry], name: str, absent: bytes = b"") -> bytes:
    """Return the content of a record, `absent` if there is no such record."""
    record = records.get(name)
    if record is None:
        return absent
    if record.nbytes > MOST_BYTES:
        raise PickleError(f"has {record.nbytes} bytes in {name!r:.60}; at most {MOST_BYTES} can be read")
    start, stop = record.content_span(window, name)
    data = window.read(start, stop - start)
    if record.crc not in (0, zlib.crc32(data)):  # torch writes 0 where it is told not to compute them
        raise PickleError(f"has a record {name!r:.60} that does not match its checksum")
    return data


def _records(window: _Window) -> dict[str, _Entry]:
    """Return the records of a zip by name, from its directory, which is at the end of the file."""
    # the end record, and its 64-bit form if there is one
    end = window.size - 22
    if window.read(end, 4) != _END:
        raise PickleError("is a zip file without its end record, or with a comment after it")
    count, nbytes, start = struct.unpack("<HII", window.read(end + 10, 10))
    if end >= 20 and window.read(end - 20, 4) == _LOCATOR_64:
        (end,) = struct.unpack("<Q", window.read(end - 12, 8))
        if window.read(end, 4) != _END_64:
            raise PickleError("is a zip file without its 64-bit end record")
        count, nbytes, start = struct.unpack("<QQQ", window.read(end + 32, 24))
    if nbytes > _MOST_DIRECTORY or start + nbytes > end or count * 46 > nbytes:
        raise PickleError(
            f"is a zip file whose directory is impossible: {count} records in {nbytes} bytes from byte {start} on"
        )

    # the records, in the order of the file: each must end before the next begins
    entries = sorted(_entries(window.read(start, nbytes), count), key=lambda pair: pair[1].header)
    record_ends = [entry.header for _, entry in entries[1:]] + [start]
    for (name, entry), record_end in zip(entries, record_ends):
        if entry.header + 30 + len(name) + entry.nbytes > record_end:
            raise PickleError(f"is a zip file whose record {name!r:.60} overlaps what follows it")
    records = {name: entry._replace(end=record_end) for (name, entry), record_end in zip(entries, record_ends)}
    if len(records) < count:
        raise PickleError("is a zip file with two records of the same name")
    return records


class _EntryHead(NamedTuple):
    """The fixed part of a directory's entry, before the record's name, extra fields and comment."""

    signature: bytes
    flags: int
    method: int
    crc: int
    packed_bytes: int
    nbytes: int
    name_bytes: int
    extra_bytes: int
    comment_bytes: int
    header: int  # where the record begins


def _entries(directory: bytes, count: int) -> Iterator[tuple[str, _Entry]]:
    """Yield (name, entry), the entry without its end."""
    position = 0
    for _ in range(count):
        head = _EntryHead(*struct.unpack("<4s4xHH4xIIIHHH8xI", directory[position : position + 46]))
        if head.signature != _ENTRY:
            raise PickleError("is a zip file whose directory is damaged")
        name_end = position + 46 + head.name_bytes
        name = directory[position + 46 : name_end].decode("utf-8", "replace")
        extra = directory[name_end : name_end + head.extra_bytes]
        nbytes, packed_bytes, header = _with_64_bits(extra, (head.nbytes, head.packed_bytes, head.header))
        if head.method or head.flags & 1 or nbytes != packed_bytes:
            raise PickleError(
                f"is a zip file whose record {name!r:.60} is compressed or encrypted; torch.save does neither"
            )
        yield name, _Entry(header, nbytes, head.crc, head.flags)
        position = name_end + head.extra_bytes + head.comment_bytes


def _with_64_bits(extra: bytes, values: tuple[int, ...]) -> tuple[int, ...]:
    """Replace those of the 32-bit values that are 0xFFFFFFFF by the 64-bit values in the extra field of kind 1."""
    position = 0
    while position + 4 <= len(extra):
        kind, nbytes = struct.unpack("<HH", extra[position : position + 4])
        if kind == 1:
            data = extra[position + 4 : position + 4 + nbytes]
            count = len(data) // 8
            wide = iter(struct.unpack(f"<{count}Q", data[: count * 8]))
            return tuple(next(wide, value) if value == 0xFFFFFFFF else value for value in values)
        position += 4 + nbytes
    return values


def _read_before_1_6(window: _Window, name: str) -> TorchFile:
    """Read a file of torch before 1.6.

    It has the magic number, protocol, system info, values and keys of storages, then the storages.
    """
    data = window.read(0, min(window.size, MOST_BYTES))
    if not data.startswith(b"\x80\x02\x8a"):  # how the pickle of the magic number begins
        raise PickleError(LFS_POINTER if is_lfs_pointer(data) else "is not a file of torch.save")
    pickles: list[Any] = []
    position = 0
    for number in range(5):
        value, length = read_pickle(data[position:])
        pickles.append(value)
        position += length
        if number == 1 and pickles != [_MAGIC, _PROTOCOL]:
            raise PickleError("is not a file of torch.save")
    values = pickles[3]
    keys = pickles[4]

    item_bytes = {storage.key: storage.item_bytes for storage in map(_storage, _persistent_ids_in(values))}
    if not isinstance(keys, list) or not all(isinstance(key, str) and key in item_bytes for key in keys):
        raise PickleError("lists storages that none of its tensors use")
    spans = {}
    for key in keys:
        (count,) = struct.unpack("<Q", window.read(position, 8))
        start = position + 8
        position = start + count * item_bytes[key]
        if position > window.size:
            raise PickleError(f"ends in the middle of its storage {key!r:.20}")
        spans[key] = Span(window.span.start + start, window.span.start + position)
    return TorchFile(name, values, spans)


def _persistent_ids_in(value: Any) -> Iterator[PersistentId]:
    """Yield all persistent ids of a value, without recursion; an object is looked at once."""
    pending = [value]
    seen = set()
    while pending:
        item = pending.pop()
        if isinstance(item, PersistentId):
            yield item
            continue
        if not isinstance(item, dict | list | tuple | PickledObject) or id(item) in seen:
            continue
        seen.add(id(item))
        if isinstance(item, dict):
            pending += item.values()
        elif isinstance(item, PickledObject):
            pending += [item.arguments, item.state, item.items]
        else:
            pending += item
