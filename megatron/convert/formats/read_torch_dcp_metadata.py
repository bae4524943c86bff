"""Read folders of torch.distributed.checkpoint: tensors and their positions, without running a pickle. No torch.

    .metadata              a pickle: the tensors by name, each with its shape and chunks, and the position of each chunk
    __0_0.distcp, ...      one after another, as `torch.save` writes a file: a chunk of a tensor, or an object

Megatron-core's `torch_dist` and torchtitan's checkpoints are such folders. A folder may be hostile (see
pickle_as_data.py and torch_save_tensor_offsets.py): chunks must cover their tensor exactly once, and no two of them may share
bytes.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from megatron.convert.formats.find_megatron_folder import METADATA
from megatron.convert.formats.hf_config_and_safetensors_headers import path_inside
from megatron.convert.formats.pickle_as_data import MOST_BYTES, GlobalName, PickledObject, PickleError, read_pickle
from megatron.convert.formats.safetensors_header import FETCH_AGAIN, TensorInFile
from megatron.convert.formats.torch_save_tensor_offsets import Span, TorchFile, read_torch_file
from megatron.core.dist_checkpointing.manifest_format import (
    ITEM_BYTES,
    CheckpointError,
    Piece,
    TensorRecord,
    is_covered_exactly_once,
)
from megatron.core.sharding.boxes import Box, is_within, size_of
from megatron.core.storage.file_layer import backend_of, read_start

_FILE = re.compile(r"__\d{1,9}_\d{1,9}\.distcp")
_CLASSES = "torch.distributed.checkpoint.metadata"
_STORED = "torch.distributed.checkpoint.filesystem._StorageInfo"


class SavedAt(NamedTuple):
    """The position of one chunk or object."""

    file: str
    span: Span


class BoxInFile(NamedTuple):
    """A box of a tensor, and its elements as a tensor in a file."""

    box: Box
    tensor: TensorInFile


@dataclass(frozen=True)
class DcpTensor:
    dtype: str
    shape: tuple[int, ...]
    chunks: tuple[tuple[Box, SavedAt], ...]


@dataclass(frozen=True)
class DcpFolder:
    """The content of the metadata; the files are not opened yet."""

    path: Path
    tensors: Mapping[str, DcpTensor]
    objects: Mapping[str, SavedAt]

    def file(self, stored: SavedAt) -> TorchFile:
        """Read the values of one chunk or object. Raises CheckpointError."""
        path_inside(self.path, stored.file)
        return read_torch_file(self.path / stored.file, stored.file, stored.span)

    def chunks_of(self, name: str) -> list[BoxInFile]:
        """Return the chunks of a tensor, in the order of their boxes.

        Raises CheckpointError, or ValueError where a file does not hold what the metadata says.
        """
        tensor = self.tensors[name]
        chunks = []
        if tensor.dtype not in ITEM_BYTES:
            raise ValueError(f"it has dtype {tensor.dtype:.30}; only {', '.join(ITEM_BYTES)} can be read")
        pieces = tuple(Piece(box, stored.file, 0, 0, "") for box, stored in tensor.chunks)
        if not is_covered_exactly_once(TensorRecord(tensor.dtype, tensor.shape, pieces)):
            raise ValueError(
                f"its {len(pieces)} chunks do not cover each element of its shape {tensor.shape} exactly once"
            )
        for box, stored in sorted(tensor.chunks):
            file = self.file(stored)
            try:
                x = file.tensor(file.values)
            except PickleError as error:
                raise CheckpointError(self.path / stored.file, str(error), FETCH_AGAIN) from error
            if x is None or x.dtype != tensor.dtype or x.shape != size_of(box):
                shown = "no tensor" if x is None else f"a tensor of {x.dtype} and shape {x.shape}"
                raise ValueError(f"its chunk {box} is {shown} in {stored.file}, but {tensor.dtype} in {METADATA}")
            chunks.append(BoxInFile(box, x))
        return chunks


def read_dcp(path: Path) -> DcpFolder:
    """Read the metadata of a folder; opens no other file. Raises CheckpointError."""
    path_inside(path, METADATA)
    try:
        stat = backend_of(path).stat(path / METADATA)
        if stat is None or not stat.is_file or stat.size > MOST_BYTES:
            raise PickleError(f"must be a file of at most {MOST_BYTES} bytes")
        data = read_start(path / METADATA, stat.size)
        value, length = read_pickle(data)
        if length != len(data):
            raise PickleError(f"has {len(data) - length} more bytes after its pickle")
        fields = _fields(value, f"{_CLASSES}.Metadata")
        return _folder_of(path, fields.get("state_dict_metadata"), fields.get("storage_data"))
    except OSError as error:
        raise CheckpointError(
            path / METADATA, f"cannot be read ({error.strerror})", "check the path and its rights"
        ) from error
    except PickleError as error:
        raise CheckpointError(path / METADATA, str(error)[:300], FETCH_AGAIN) from error


def _folder_of(path: Path, described: Any, places: Any) -> DcpFolder:
    """described, places: the metadata's state_dict_metadata and storage_data, unchecked."""
    if not isinstance(described, dict) or not isinstance(places, dict):
        raise PickleError("lacks state_dict_metadata or storage_data")
    stored = _stored_by_key(places)
    tensors = {}
    objects = {}
    for name, value in described.items():
        if not isinstance(name, str):
            raise PickleError("has a tensor whose name is not a string")
        if isinstance(value, PickledObject) and value.is_a(f"{_CLASSES}.BytesStorageMetadata"):
            if (name, None) in stored:
                objects[name] = stored.pop((name, None))
            continue
        fields = _fields(value, f"{_CLASSES}.TensorStorageMetadata")
        shape = _numbers(fields.get("size"))
        chunk_list = fields.get("chunks")
        if not isinstance(chunk_list, list):
            raise PickleError(f"has {name!r:.80} without chunks")
        chunks = []
        for chunk in chunk_list:
            box = _box_of(_fields(chunk, f"{_CLASSES}.ChunkStorageMetadata"))
            place = stored.pop((name, tuple(start for start, _ in box)), None)
            if place is None or not (is_within(box, shape) or 0 in shape):
                where = (
                    "that is outside the tensor's shape" if place else "that has no file position, or is listed twice"
                )
                raise PickleError(f"has a chunk {box!r:.60} of {name!r:.80} {where}")
            chunks.append((box, place))
        tensors[name] = DcpTensor(_dtype_of(fields.get("properties")), shape, tuple(chunks))
    if stored:
        raise PickleError(f"has a file position for {next(iter(stored))[0]!r:.80}, but no shape and dtype")
    return DcpFolder(path, tensors, objects)


def _stored_by_key(places: Mapping[Any, Any]) -> dict[tuple[str, tuple[int, ...] | None], SavedAt]:
    """Return (name, first corner of the chunk; None for an object) -> its position.

    Refuses bytes that two of them share.
    """
    by_key = {}
    for key, value in places.items():
        index = _fields(key, f"{_CLASSES}.MetadataIndex")
        place = _fields(value, _STORED)
        name = index.get("fqn")
        corner = index.get("offset")
        file = place.get("relative_path")
        start = place.get("offset")
        length = place.get("length")
        if not isinstance(name, str) or not isinstance(file, str) or not _FILE.fullmatch(file):
            raise PickleError(
                f"says that {name!r:.80} is in {file!r:.80}, which is not the name of a file in this folder"
            )
        if type(start) is not int or type(length) is not int or start < 0 or length <= 0:
            raise PickleError(
                f"says that {name!r:.80} is at byte {start!r:.30} and {length!r:.30} bytes long, which is impossible"
            )
        if place.get("transform_descriptors"):
            raise PickleError(f"has {name!r:.80} compressed or encrypted, which cannot be read")
        full_key = (name, None if corner is None else _numbers(corner))
        if full_key in by_key:
            raise PickleError(f"has two file positions for {name!r:.80}")
        by_key[full_key] = SavedAt(file, Span(start, start + length))
    for first, second in pairwise(sorted(by_key.values())):
        if first.file == second.file and second.span.start < first.span.stop:
            raise PickleError(
                f"has two values that overlap in bytes {second.span.start} to {first.span.stop} of {first.file}"
            )
    return by_key


def _fields(value: Any, kind: str) -> dict[str, Any]:
    """Return the attributes of an object of the class `kind`."""
    if not isinstance(value, PickledObject) or not value.is_a(kind) or not isinstance(value.state, dict):
        raise PickleError(f"has a value of another class where a {kind.rpartition('.')[2]} belongs")
    return value.state


def _numbers(value: Any) -> tuple[int, ...]:
    """Return the numbers of a torch.Size."""
    if isinstance(value, PickledObject) and value.is_a("torch.Size") and len(value.arguments) == 1:
        value = value.arguments[0]
    if not isinstance(value, tuple | list) or len(value) > 64:
        raise PickleError("has a shape that does not consist of numbers")
    if not all(type(size) is int and 0 <= size < 1 << 62 for size in value):
        raise PickleError("has a shape that does not consist of numbers")
    return tuple(value)


def _box_of(fields: Mapping[str, Any]) -> Box:
    starts = _numbers(fields.get("offsets"))
    sizes = _numbers(fields.get("sizes"))
    if len(starts) != len(sizes):
        raise PickleError("has a chunk whose number of offsets differs from its number of sizes")
    return tuple((start, start + size) for start, size in zip(starts, sizes))


def _dtype_of(properties: Any) -> str:
    """Return the dtype of a tensor's properties, whose state is a tuple that begins with it."""
    state = None
    if isinstance(properties, PickledObject) and properties.is_a(f"{_CLASSES}.TensorProperties"):
        state = properties.state
    if not isinstance(state, tuple) or not state or not isinstance(state[0], GlobalName) or state[0].module != "torch":
        raise PickleError("has a tensor whose dtype is missing")
    return state[0].name
