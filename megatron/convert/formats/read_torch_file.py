"""What `torch.save` has written: the values of its pickle, and the place of each tensor in the file. No torch; nothing
is run.

    a zip (torch from 1.6 on)      archive/data.pkl, archive/data/0, archive/data/1, ...; records as they are, never
    compressed
    before                         five pickles, then each storage after its number of elements

A file may be hostile: records must lie apart and within the file, tensors row-major and within their records.
"""

import math
import struct
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from megatron.convert.formats.pickle_as_data import MOST_BYTES, Beside, Made, Named, PickleError, read_pickle
from megatron.convert.formats.safetensors_header import FETCH_AGAIN, TensorInFile
from megatron.core.dist_checkpointing.format import ITEM_BYTES, CheckpointError
from megatron.core.storage.file_layer import backend_of, read_all

_HAS_AFTER = 8  # flag of a record whose checksum and sizes follow its content
_STORAGES = {"Double": "float64", "Float": "float32", "Half": "float16", "BFloat16": "bfloat16", "Long": "int64"}
_STORAGES |= {"Int": "int32", "Byte": "uint8", "Bool": "bool"}
_DTYPES = {f"{kind}Storage": dtype for kind, dtype in _STORAGES.items()}
_END, _END_64 = b"PK\x05\x06", b"PK\x06\x06"
_LOCATOR_64, _ENTRY = b"PK\x06\x07", b"PK\x01\x02"
_RECORD, _AFTER = b"PK\x03\x04", b"PK\x07\x08"
_MOST_DIRECTORY, _MOST_SIZE = 256 << 20, 1 << 62  # bytes
_MAGIC, _PROTOCOL = 0x1950A86A20F9469CFC6C, 1001  # of files before 1.6


class Span(NamedTuple):
    """Bytes of a file: a file of its own, or one that lies in another."""

    start: int
    stop: int


@dataclass(frozen=True)
class TorchFile:
    """The values of a file, and where its storages lie."""

    name: str
    values: Any  # of its pickle
    storages: Mapping[str, Span]

    def tensor(self, value: Any) -> TensorInFile | None:
        """The place of a value that is a tensor; None for other values. Raises PickleError for a tensor that is not read."""
        if not isinstance(value, Made):
            return None
        parts = value.arguments
        if value.is_a("torch._utils._rebuild_parameter", "torch._utils._rebuild_parameter_with_state"):
            return self.tensor(parts[0]) if parts else None
        if not value.is_a(*(f"torch._utils._rebuild_tensor{version}" for version in ("", "_v2"))):
            return None
        if len(parts) < 4 or not isinstance(parts[0], Beside):
            raise PickleError("has a tensor without a storage")
        storage = _storage(parts[0])
        start, shape = parts[1:3]
        if not _are_counts([start]) or not isinstance(shape, tuple) or not _are_counts(shape):
            raise PickleError("has a tensor whose shape is no numbers")
        if not isinstance(strides := parts[3], tuple) or not _is_row_major(shape, strides):
            raise PickleError(f"has a tensor of shape {shape!r:.60} whose strides are not row-major")
        span, nbytes = self.storages.get(storage.key), storage.count * storage.item
        if span is None or nbytes != span.stop - span.start or start + math.prod(shape) > storage.count:
            raise PickleError(f"has a tensor of shape {shape!r:.60} beyond its storage {storage.key!r:.20}")
        return TensorInFile(self.name, storage.dtype, shape, span.start + start * storage.item)


def _are_counts(values: Any) -> bool:
    return len(values) <= 64 and all(type(value) is int and 0 <= value < _MOST_SIZE for value in values)


def _is_row_major(shape: tuple[int, ...], strides: tuple[Any, ...]) -> bool:
    """As `Tensor.is_contiguous` says: a dimension of size 1 may have any stride."""
    if len(strides) != len(shape) or not all(type(stride) is int for stride in strides):
        return False
    wanted = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    return 0 in shape or all(size == 1 or stride == want for size, stride, want in zip(shape, strides, wanted))


class _Storage(NamedTuple):
    """A storage beside the pickle."""

    key: str
    dtype: str
    count: int  # of elements

    @property
    def item(self) -> int:
        return ITEM_BYTES[self.dtype]


def _storage(stored: Beside) -> _Storage:
    place = stored.place
    if not isinstance(place, tuple) or len(place) not in (5, 6) or place[0] != "storage":
        raise PickleError("has a storage of another kind")
    kind, key = place[1:3]
    if not isinstance(kind, Named) or str(kind) not in {f"torch.{name}" for name in _DTYPES}:
        what = str(kind) if isinstance(kind, Named) else "storage without a dtype"
        raise PickleError(f"has a {what:.60}, which is not read; read are {', '.join(_DTYPES)}")
    if not isinstance(key, str) or not _are_counts(place[4:5]) or place[5:] not in ((), (None,)):
        raise PickleError("has a storage without a place")
    return _Storage(key, _DTYPES[kind.name], place[4])


# ---------------------------------------------------------------- files


def read_torch_file(path: Path, name: str, span: Span | None = None) -> TorchFile:
    """The values of a file, or of the part `span` of one; reads no tensors. name: of the file, in its tensors.

    Raises CheckpointError.
    """
    try:
        size = found.size if (found := backend_of(path).stat(path)) is not None and found.is_file else 0
        span = span or Span(0, size)
        if not 0 <= span.start < span.stop <= size:
            raise PickleError(f"has {size} bytes, and would be read from {span.start} to {span.stop}")
        with backend_of(path).open(path, "rb") as file:
            window = _Window(file, path, span)
            return _read_zip(window, name) if window.read(0, 4) == _RECORD else _read_old(window, name)
    except OSError as error:
        raise CheckpointError(path, f"cannot be read ({error.strerror})", "check the path and its rights") from error
    except (PickleError, struct.error) as error:
        raise CheckpointError(path, str(error)[:300], FETCH_AGAIN) from error


class _Window(NamedTuple):
    file: BinaryIO
    path: Path
    span: Span

    @property
    def size(self) -> int:
        return self.span.stop - self.span.start

    def read(self, start: int, count: int) -> bytes:
        """Bytes from `start` on, which counts from the window's start."""
        if start < 0 or count < 0 or start + count > self.size:
            raise PickleError(f"has {self.size} bytes, and would be read from {start} to {start + count}")
        room = bytearray(count)
        self.file.seek(self.span.start + start)
        if read_all(self.file, memoryview(room), self.path) < count:
            raise PickleError("is shorter than its size")
        return bytes(room)


def _read_zip(window: _Window, name: str) -> TorchFile:
    records = _records(window)
    pickles = [key for key in records if key.count("/") == 1 and key.endswith("/data.pkl")]
    if len(pickles) != 1:
        raise PickleError("is a zip without data.pkl, which torch.save writes")
    root = pickles[0].removesuffix("data.pkl")
    if (order := _content(window, records, f"{root}byteorder", b"little")) != b"little":
        raise PickleError(f"has byte order {order[:10]!r}; read is little")
    data = _content(window, records, pickles[0])
    values, _ = read_pickle(data)
    stored = {key: record for key, record in records.items() if key.startswith(f"{root}data/")}
    begin, cut = window.span.start, len(f"{root}data/")
    places = {key[cut:]: record.place(window, key) for key, record in stored.items()}
    return TorchFile(name, values, {key: Span(begin + start, begin + stop) for key, (start, stop) in places.items()})


class _Entry(NamedTuple):
    """A record as the directory of a zip says it."""

    header: int  # its place
    nbytes: int
    crc: int
    flags: int
    end: int = 0  # where the next record or the directory begins

    def place(self, window: _Window, name: str) -> Span:
        """Of its content."""
        header = window.read(self.header, 30)
        names, extras = struct.unpack("<HH", header[26:])
        start = self.header + 30 + names + extras
        (flags,) = struct.unpack("<H", header[6:8])
        is_here = (
            header[:4] == _RECORD and flags == self.flags and window.read(self.header + 30, names) == name.encode()
        )
        if not is_here or not self._ends_at(window, start + self.nbytes):
            raise PickleError(f"has a record {name!r:.60} that is not where its directory says")
        return Span(start, start + self.nbytes)

    def _ends_at(self, window: _Window, stop: int) -> bool:
        """Whether the record's checksum and sizes lie between its content and what follows, or nothing if it has them
        elsewhere.

        A header whose lengths were changed would else move the content by as many bytes.
        """
        forms = {16: "<4sIII", 24: "<4sIQQ"}
        if not self.flags & _HAS_AFTER:
            return stop == self.end
        if (form := forms.get(self.end - stop)) is None or self.nbytes >> 8 * (4 if form == forms[16] else 8):
            return False
        after = struct.pack(form, _AFTER, self.crc, self.nbytes, self.nbytes)
        return window.read(stop, self.end - stop) == after


def _content(window: _Window, records: Mapping[str, _Entry], name: str, absent: bytes = b"") -> bytes:
    if (record := records.get(name)) is None:
        return absent
    if record.nbytes > MOST_BYTES:
        raise PickleError(f"has {record.nbytes} bytes in {name!r:.60}; read are up to {MOST_BYTES}")
    start, stop = record.place(window, name)
    data = window.read(start, stop - start)
    if record.crc not in (0, zlib.crc32(data)):  # torch writes 0 where it is told not to compute them
        raise PickleError(f"has another {name!r:.60} than its checksum says")
    return data


def _records(window: _Window) -> dict[str, _Entry]:
    """The records of a zip by name, from its directory, which ends the file."""
    tail = window.size - 22
    if window.read(tail, 4) != _END:
        raise PickleError("is a zip without an end, or with a comment after it")
    directory = _Directory(*struct.unpack("<HII", window.read(tail + 10, 10)))
    if tail >= 20 and window.read(tail - 20, 4) == _LOCATOR_64:
        (tail,) = struct.unpack("<Q", window.read(tail - 12, 8))
        if window.read(tail, 4) != _END_64:
            raise PickleError("is a zip without an end")
        directory = _Directory(*struct.unpack("<QQQ", window.read(tail + 32, 24)))
    size, start = directory.nbytes, directory.start
    if size > _MOST_DIRECTORY or start + size > tail or directory.count * 46 > size:
        raise PickleError(f"is a zip with {directory.count} records in {size} bytes from byte {start} on")
    found = sorted(_entries(window.read(start, size), directory.count), key=lambda pair: pair[1].header)
    ends = [entry.header for _, entry in found[1:]] + [start]
    for (name, entry), end in zip(found, ends):
        if entry.header + 30 + len(name) + entry.nbytes > end:
            raise PickleError(f"is a zip whose record {name!r:.60} overlaps what follows it")
    records = {name: entry._replace(end=end) for (name, entry), end in zip(found, ends)}
    if len(records) < directory.count:
        raise PickleError("is a zip with two records of one name")
    return records


class _Directory(NamedTuple):
    """Of a zip: its records, and where their entries lie."""

    count: int
    nbytes: int
    start: int


class _Head(NamedTuple):
    """A directory's entry, before its name, its extra fields and a comment."""

    mark: bytes
    flags: int
    method: int
    crc: int
    packed: int
    size: int
    names: int
    extras: int
    comments: int
    place: int


def _entries(directory: bytes, count: int) -> Iterator[tuple[str, _Entry]]:
    """(name, record), whose end is not known yet."""
    at = 0
    for _ in range(count):
        head = _Head(*struct.unpack("<4s4xHH4xIIIHHH8xI", directory[at : at + 46]))
        if head.mark != _ENTRY:
            raise PickleError("is a zip whose directory is damaged")
        stop = at + 46 + head.names
        name = directory[at + 46 : stop].decode("utf-8", "replace")
        wide = _wide(directory[stop : stop + head.extras], (head.size, head.packed, head.place))
        if head.method or head.flags & 1 or wide[0] != wide[1]:
            raise PickleError(f"is a zip whose record {name!r:.60} is compressed or encrypted; torch.save does neither")
        yield name, _Entry(wide[2], wide[0], head.crc, head.flags)
        at = stop + head.extras + head.comments


def _wide(extra: bytes, values: tuple[int, ...]) -> tuple[int, ...]:
    """Numbers of 32 bits, with those that have no room there taken from the extra field of 64."""
    at = 0
    while at + 4 <= len(extra):
        kind, nbytes = struct.unpack("<HH", extra[at : at + 4])
        if kind == 1:
            rest = extra[at + 4 : at + 4 + nbytes]
            full = iter(struct.unpack(f"<{len(rest) // 8}Q", rest[: len(rest) // 8 * 8]))
            return tuple(next(full, value) if value == 0xFFFFFFFF else value for value in values)
        at += 4 + nbytes
    return values


def _read_old(window: _Window, name: str) -> TorchFile:
    """A file of torch before 1.6."""
    data, done = window.read(0, min(window.size, MOST_BYTES)), 0
    if not data.startswith(b"\x80\x02\x8a"):  # how the pickle of the magic number begins
        raise PickleError("is no file of torch.save")
    values: list[Any] = []
    for number in range(5):
        value, length = read_pickle(data[done:])
        values.append(value)
        done += length
        if number == 1 and values != [_MAGIC, _PROTOCOL]:
            break
    if values[:2] != [_MAGIC, _PROTOCOL]:
        raise PickleError("is no file of torch.save")
    kinds = {storage.key: storage.item for storage in map(_storage, _stored_in(values[3]))}
    keys, spans = values[4], {}
    if not isinstance(keys, list) or not all(isinstance(key, str) and key in kinds for key in keys):
        raise PickleError("names storages that its values do not have")
    for key in keys:
        (count,) = struct.unpack("<Q", window.read(done, 8))
        start = done + 8
        done = start + count * kinds[key]
        if done > window.size:
            raise PickleError(f"ends within its storage {key!r:.20}")
        spans[key] = Span(window.span.start + start, window.span.start + done)
    return TorchFile(name, values[3], spans)


def _stored_in(value: Any) -> Iterator[Beside]:
    """All storages of a value, without recursion; an object is looked at once."""
    left, seen = [value], set()
    while left:
        one = left.pop()
        if isinstance(one, Beside):
            yield one
        elif isinstance(one, dict | list | tuple | Made) and id(one) not in seen:
            seen.add(id(one))
            left += [*one.values()] if isinstance(one, dict) else _parts(one) if isinstance(one, Made) else [*one]


def _parts(made: Made) -> list[Any]:
    return [made.arguments, made.state, made.items]
