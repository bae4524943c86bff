"""Read and write headers of the safetensors format. No torch.

    8 bytes          length N of the header, little-endian
    N bytes          {"name": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}, ..., "__metadata__": {}}
    the rest         the values, row-major and little-endian; offsets count from here, without gaps or overlaps

A file may be hostile: the size of the header is bounded, and all of it is checked before any tensor is read. There is
no code in the format. Source: https://huggingface.co/docs/safetensors
"""

import json
import math
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from megatron.core.base.lfs_pointer import FETCH_LFS, LFS_POINTER, is_lfs_pointer
from megatron.core.dist_checkpointing.manifest_format import ITEM_BYTES, CheckpointError
from megatron.core.storage.file_layer import backend_of, read_start

_DTYPES = {"F64": "float64", "F32": "float32", "BF16": "bfloat16", "F16": "float16"}
_DTYPES |= {"I64": "int64", "I32": "int32", "U8": "uint8", "BOOL": "bool"}
_SHORT_NAMES = {name: short for short, name in _DTYPES.items()}
_NOT_READ = ("I16", "I8", "U16", "U32", "U64", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F4", "F6_E2M3", "F6_E3M2", "C64")

FETCH_AGAIN = "the file is damaged or hostile; fetch it again from its source"
_MOST_HEADER = 100_000_000  # bytes, as in the format's own library
_MOST_DIMS = 64
_MOST_BYTES = 1 << 62


class _PackedValues(ValueError):
    """A tensor of a known dtype that is not read."""


class TensorInFile(NamedTuple):
    """A tensor in a file: row-major, from byte `start` on."""

    file: str
    dtype: str
    shape: tuple[int, ...]
    start: int

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


def read_header(path: Path) -> dict[str, TensorInFile]:
    """Read the tensors of a file, by name. Raises CheckpointError unless they fill the file exactly."""
    try:
        stat = backend_of(path).stat(path)
        if stat is None or not stat.is_file:
            raise CheckpointError(path, "is not a file", FETCH_AGAIN)
        if is_lfs_pointer(read_start(path, 100)):
            raise CheckpointError(path, LFS_POINTER, FETCH_LFS)
        (length,) = struct.unpack("<Q", read_start(path, 8).ljust(8, b"\0"))
        if not 2 <= length <= min(_MOST_HEADER, stat.size - 8):
            wrong = f"says that its header has {length} bytes, and has {stat.size} bytes itself"
            raise CheckpointError(path, wrong, FETCH_AGAIN)
        text = read_start(path, 8 + length)[8:]
    except OSError as error:
        raise CheckpointError(path, f"cannot be read ({error.strerror})", "check the path and its rights") from error
    try:
        header = json.loads(text.decode(), object_pairs_hook=without_repeats)
        return dict(_tensors_of(header, path.name, 8 + length, stat.size))
    except _PackedValues as error:
        raise CheckpointError(path, str(error)[:300], "give the unquantized model") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(path, f"has a header that cannot be used: {str(error)[:200]}", FETCH_AGAIN) from error


def _tensors_of(header: Any, file: str, data: int, size: int) -> Iterator[tuple[str, TensorInFile]]:
    """Yield the tensors of a parsed header, in the order of their bytes.

    These start at byte `data` and end at byte `size`.
    """
    if not isinstance(header, dict):
        raise ValueError("it is not a JSON object")
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or any(type(value) is not str for value in metadata.values()):
        raise ValueError("its __metadata__ must be an object whose values are strings")
    entries = sorted(_checked_entry(name, entry) for name, entry in header.items())
    end = 0
    for start, stop, name, dtype, shape in entries:
        if start != end:
            raise ValueError(f"{name!r:.80} begins at byte {start}, but the tensors before it end at byte {end}")
        yield name, TensorInFile(file, dtype, shape, data + start)
        end = stop
    if data + end != size:
        raise ValueError(f"its tensors end at byte {data + end}, but the file has {size} bytes")


def _checked_entry(name: str, entry: Any) -> tuple[int, int, str, str, tuple[int, ...]]:
    """Return (start, stop, name, dtype, shape) of a header's entry."""
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise ValueError(f"{name!r:.80} must be an object with the keys dtype, shape and data_offsets")
    dtype = entry["dtype"]
    shape = entry["shape"]
    offsets = entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in _DTYPES:
        readable = f"only {', '.join(_DTYPES)} can be read"
        if dtype in _NOT_READ:
            raise _PackedValues(f"holds {name!r:.80} in {dtype}, quantized or packed values; {readable}")
        raise ValueError(f"{name!r:.80} has dtype {dtype!r:.20}: not a known dtype; {readable}")
    if not _are_counts(shape) or len(shape) > _MOST_DIMS or not _are_counts(offsets) or len(offsets) != 2:
        raise ValueError(f"{name!r:.80} has an impossible shape {shape!r:.60} or data_offsets {offsets!r:.60}")
    if offsets[1] - offsets[0] != math.prod(shape) * ITEM_BYTES[_DTYPES[dtype]]:
        raise ValueError(
            f"{name!r:.80} has {offsets[1] - offsets[0]} bytes, which do not fit {dtype} and shape {shape!r:.60}"
        )
    return *offsets, name, _DTYPES[dtype], tuple(shape)


def _are_counts(values: Any) -> bool:
    return isinstance(values, list) and all(type(value) is int and 0 <= value < _MOST_BYTES for value in values)


def without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Refuse an object that names a key twice; an object_pairs_hook for `json.loads`."""
    result = dict(pairs)
    if len(result) < len(pairs):
        raise ValueError("a JSON object has the same key twice")
    return result


def header_of(tensors: Mapping[str, tuple[str, tuple[int, ...]]]) -> bytes:
    """Return the length and header of a file whose tensors follow in this order. tensors: name -> (dtype, shape)."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}  # transformers 4 refuses a file without it
    end = 0
    for name, (dtype, shape) in tensors.items():
        start = end
        end += math.prod(shape) * ITEM_BYTES[dtype]
        header[name] = {"dtype": _SHORT_NAMES[dtype], "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)  # values of 8 bytes lie aligned
    return struct.pack("<Q", len(text)) + text
