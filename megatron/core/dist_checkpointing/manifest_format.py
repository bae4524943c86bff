"""The format of a checkpoint: raw tensor files, and one JSON manifest that locates each box of each tensor. No torch.

    <root>/latest_checkpointed_iteration.txt      100
    <root>/iter_0000100/manifest.json             every piece with its file, offset and hash, and the state of the run
    <root>/iter_0000100/rank_00000.bin            pieces end to end, each starting at a multiple of 64 bytes

A piece is one box of one tensor: its elements in row-major order, hashed with SHA-256. Every byte of a file belongs to
a piece, or is a zero that aligns the next piece. The layout of the run is not recorded: a reader intersects its own
boxes with the saved ones. The manifest ends in its own hash, which also protects the state. Nothing is unpickled. A
manifest may be hostile: checking it takes time linear in its length, except for one sort.
"""

import errno
import hashlib
import json
import math
import re
import sys
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, is_dataclass
from functools import cache
from itertools import product
from operator import getitem
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

from megatron.core.base.dataclass_flags import ProblemsError
from megatron.core.sharding.boxes import Box, intersect, is_within, size_of

FORMAT = "megatron-boxes"
FORMAT_VERSION = 1
BUFFERS_VERSION = 2  # of a checkpoint with buffers of modules: earlier code would leave them out without a word
BUFFER = "buffer/"  # the start of a buffer's name
MANIFEST = "manifest.json"
LATEST = "latest_checkpointed_iteration.txt"
PARTIAL = ".partial"
REPLACED = ".replaced"
SPOILED = ".damaged"
ALIGNMENT = 64  # bytes: a cache line, so that a memory map of a piece suits every dtype and vector width

ITEM_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "int64": 8, "int32": 4, "uint8": 1, "bool": 1}

DAMAGED = "the checkpoint is damaged or was edited; load another iteration or restore this file from a copy"
NOT_SEEN = "every rank must see the folder; is it on a file system that all ranks share?"
_MAX_SHOWN = 10  # problems per message: a wrong layout makes one for every tensor
_MAX_DIMS = 64  # dimensions of a tensor; torch has no more
_MAX_DIVIDED_DIMS = 6  # dimensions along which a tensor is divided
_MAX_FILE_NAME = 255  # bytes, on every common file system
_MAX_COMPARED = 100_000  # pairs of boxes that are compared to name two that overlap


class CheckpointError(ProblemsError, ValueError):
    """A checkpoint cannot be written or read: the file, what is wrong with it, what to do.

    problems: one line for each thing that is wrong, with the file; the last says what to do, and how many more there are.
    """

    def __init__(self, file: Path | str, wrong: str | list[str], advice: str):
        self.file = file
        self.wrong = wrong
        self.advice = advice
        problems = [wrong] if isinstance(wrong, str) else wrong
        if len(problems) == 1:
            message = f"{file}: {problems[0]}; {advice}"
        else:
            shown = problems[:_MAX_SHOWN]
            if len(problems) > _MAX_SHOWN:
                shown.append(f"and {len(problems) - _MAX_SHOWN} more")
            lines = "".join(f"\n  {problem}" for problem in shown)
            message = f"{file}:{lines}\n{advice}"
        super().__init__(message)
        self.problems = [f"{file}: {problem}" for problem in problems[:_MAX_SHOWN]]
        more = f", and {len(problems) - _MAX_SHOWN} more" if len(problems) > _MAX_SHOWN else ""
        self.problems[-1] += f"{more}; {advice}"


@dataclass(frozen=True)
class Piece:
    """One box of one tensor, and where its bytes are."""

    box: Box
    file: str
    offset: int
    nbytes: int
    sha256: str


@dataclass(frozen=True)
class TensorRecord:
    """One global tensor. Its pieces are disjoint and cover it."""

    dtype: str
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]


@dataclass(frozen=True)
class Manifest:
    """The contents of a checkpoint folder. While saving, each rank writes a manifest of its own pieces."""

    iteration: int
    state: dict[str, Any]
    files: dict[str, int]  # name -> bytes
    tensors: dict[str, TensorRecord]


# ---------------------------------------------------------------- names of folders and files


def folder_name(iteration: int) -> str:
    """Return the name of a complete checkpoint's folder: 100 -> `iter_0000100`."""
    return f"iter_{iteration:07d}"


def iteration_of(name: str) -> int | None:
    """Return the iteration in a folder name: `iter_0000100` -> 100; None for other names."""
    match = re.fullmatch(r"iter_([0-9]{7,})", name)
    if match is None:
        return None
    return int(match[1])


def file_name(rank: int, suffix: str) -> str:
    """Return the name of a rank's file: (0, ".bin") -> `rank_00000.bin`."""
    return f"rank_{rank:05d}{suffix}"


def item_bytes_of(shape: Iterable[int], dtype: str) -> int:
    """Return the bytes of a tensor of this shape and dtype."""
    return math.prod(shape) * ITEM_BYTES[dtype]


# ---------------------------------------------------------------- to JSON and back


def _sealed(body: str) -> str:
    """Return `body`, a JSON object without its closing brace, completed by its hash."""
    return f'{body},\n"sha256": "{hashlib.sha256(body.encode()).hexdigest()}"}}\n'


_SEAL_LENGTH = len(_sealed(""))


def to_json(manifest: Manifest) -> str:
    """Return the text of a manifest, with one line per tensor."""
    has_buffers = any(name.startswith(BUFFER) for name in manifest.tensors)
    version = BUFFERS_VERSION if has_buffers else FORMAT_VERSION
    header = {"format": FORMAT, "version": version, "byte_order": sys.byteorder}
    for name, value in vars(manifest).items():
        if name != "tensors":
            header[name] = value
    header_lines = [f"{json.dumps(key)}: {json.dumps(value, allow_nan=False)}" for key, value in header.items()]
    tensor_lines = []
    for name, record in manifest.tensors.items():
        tensor_lines.append(f"{json.dumps(name)}: {json.dumps(record, default=vars)}")
    header_text = ",\n".join(header_lines)
    tensors_text = ",\n".join(tensor_lines)
    return _sealed(f'{{{header_text},\n"tensors": {{\n{tensors_text}\n}}')


def parse_manifest(text: str, file: Path | str) -> Manifest:
    """Parse a manifest and check each value. The caller must also call `check_complete`.

    file: named in errors. Raises CheckpointError.
    """
    try:
        raw = json.loads(text, object_pairs_hook=_without_repeats, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(file, f"is not JSON from beginning to end ({error})", DAMAGED) from error
    is_sealed = text == _sealed(text[:-_SEAL_LENGTH])
    _check_header(raw, file, is_sealed=is_sealed)
    if not is_sealed:
        raise CheckpointError(file, "does not match the sha256 in its last line", DAMAGED)
    try:
        manifest = _convert(Manifest, raw, "the manifest")
    except _Malformed as error:
        raise CheckpointError(file, str(error), DAMAGED) from error
    problems = _file_name_problems(manifest) + _piece_problems(manifest)
    if problems:
        raise CheckpointError(file, problems, DAMAGED)
    return manifest


def _check_header(raw: Any, file: Path | str, *, is_sealed: bool) -> None:
    """Raise CheckpointError for another format, version or byte order.

    is_sealed: the text matches its hash. Then another format is not damage.
    """
    header = raw if isinstance(raw, dict) else {}
    for key, known, advice in (
        ("format", (FORMAT,), "convert it, or give another folder"),
        ("version", (FORMAT_VERSION, BUFFERS_VERSION), "load it with the release that wrote it, or update this one"),
        ("byte_order", (sys.byteorder,), "load it on a machine like the one that wrote it"),
    ):
        if header.get(key) not in known:
            read = " and ".join(map(repr, known))
            wrong = f"has {key} {header.get(key)!r:.60}; this code and machine read {read}"
            raise CheckpointError(file, wrong, advice if is_sealed else DAMAGED)


def advice_after(error: Exception) -> str:
    """Return the advice after a failed read.

    EIO means that the disk has lost the bytes; any other OSError is no damage.
    """
    is_lost = not isinstance(error, OSError) or error.errno == errno.EIO
    return DAMAGED if is_lost else NOT_SEEN


class _Malformed(ValueError):
    """A value of the wrong type in a manifest; becomes a CheckpointError with the file's name."""


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) < len(pairs):
        raise ValueError("a JSON object has the same key twice")
    return result


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


_hints = cache(get_type_hints)


def _convert(kind: Any, value: Any, path: str) -> Any:
    """Return `value`, parsed JSON, as a `kind`: a dataclass above or the type of one of its fields.

    path: of the value in the manifest, for errors. Raises _Malformed if the value does not fit.
    """
    # a plain value of this type; integers have 64 bits
    if type(value) is kind and (kind is not int or 0 <= value < 1 << 63):
        return value

    origin = get_origin(kind)
    inner = get_args(kind)
    if is_dataclass(kind):
        if isinstance(value, dict):
            fields = _hints(kind).items()
            return kind(**{name: _convert(field, value.get(name), f"{path}, {name!r}") for name, field in fields})
        expected = f"an object with {', '.join(_hints(kind))}"
    elif origin is tuple:
        has_any_length = inner[-1] is ...
        if isinstance(value, list) and (has_any_length or len(value) == len(inner)):
            return tuple([_convert(inner[0], item, path) for item in value])
        expected = "a list" if has_any_length else f"a list of {len(inner)} integers from 0 up"
    elif origin is dict and inner[1] is not Any:
        if isinstance(value, dict):
            return {name: _convert(inner[1], item, f"{path}, {name!r}") for name, item in value.items()}
        expected = "an object"
    elif kind is int:
        expected = "an integer from 0 up, in 64 bits"
    elif type(value) is origin:  # dict[str, Any]: the state of the run, which is checked where it is read
        return value
    else:
        expected = f"of type {(origin or kind).__name__}"
    raise _Malformed(f"{path}: {value!r:.60} is not {expected}")


# ---------------------------------------------------------------- checks between the values


def _file_name_problems(manifest: Manifest) -> list[str]:
    """Return the file names that could leave the folder: a manifest may be hostile."""
    problems = []
    for name in manifest.files:
        is_plain = re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]*", name) is not None
        if not is_plain or ".." in name or len(name) > _MAX_FILE_NAME:
            problems.append(
                f"names the file {name!r:.60}; a file name is made of at most {_MAX_FILE_NAME} letters, digits, '_', '-' and "
                "'.', has no '..' and no folder"
            )
    return problems


def _piece_problems(manifest: Manifest) -> list[str]:
    """Return the pieces that do not fit their tensor or their file."""
    problems = []
    for name, record in manifest.tensors.items():
        if record.dtype not in ITEM_BYTES or len(record.shape) > _MAX_DIMS:
            has = f"dtype {record.dtype!r} and {len(record.shape)} dimensions"
            problems.append(f"tensor {name!r} has {has}; allowed are {', '.join(ITEM_BYTES)}, and {_MAX_DIMS}")
            continue
        for piece in record.pieces:
            what = f"tensor {name!r}, box {show_box(piece.box)}"
            end = piece.offset + piece.nbytes
            if not is_within(piece.box, record.shape):
                problems.append(f"{what} is not a box within shape {record.shape}")
            elif piece.nbytes != item_bytes_of(size_of(piece.box), record.dtype):
                problems.append(f"{what} cannot have {piece.nbytes} bytes of {record.dtype}")
            elif piece.file not in manifest.files:
                problems.append(f"{what} ends at byte {end} of {piece.file!r}, which is not listed")
            elif end > manifest.files[piece.file]:
                problems.append(f"{what} ends at byte {end} of {piece.file!r}, which has {manifest.files[piece.file]}")
            elif not re.fullmatch("[0-9a-f]{64}", piece.sha256):
                problems.append(f"{what} has {piece.sha256!r} where a sha256 in hexadecimal belongs")
    return problems


def check_complete(manifest: Manifest, file: Path | str, advice: str = DAMAGED) -> None:
    """Raise CheckpointError unless the pieces of each tensor are disjoint and cover it.

    The pieces of each file must fill it, too.
    """
    broken = [(name, record) for name, record in manifest.tensors.items() if not is_covered_exactly_once(record)]
    problems = [_cover_problem(name, record) for name, record in broken[:_MAX_SHOWN]]
    problems += [name for name, _ in broken[_MAX_SHOWN:]]  # these are counted, not shown
    if not problems:
        problems = _file_problems(manifest)
    if problems:
        raise CheckpointError(file, problems, advice)


def is_covered_exactly_once(record: TensorRecord) -> bool:
    """Return whether the boxes of a tensor are disjoint and cover it, in time linear in their number.

    The indicator function of a box is the cumulative sum, along each dimension, of +1 and -1 at its 2^d corners. So
    boxes cover each element once if and only if their signed corners sum to those of the whole tensor.
    """
    if 0 in record.shape:
        return not record.pieces
    dims = _divided_dims(record)
    if len(dims) > _MAX_DIVIDED_DIMS:
        return False
    # Each corner takes the start (0) or the stop (1) of every dimension; its sign is -1 to the number of stops.
    ends_and_signs = [(ends, (-1) ** sum(ends)) for ends in product((0, 1), repeat=len(dims))]
    whole_tensor = tuple((0, size) for size in record.shape)
    boxes_and_counts = [(piece.box, 1) for piece in record.pieces]
    boxes_and_counts.append((whole_tensor, -1))
    corners: Counter[tuple[int, ...]] = Counter()
    for box, count in boxes_and_counts:
        spans = [box[dim] for dim in dims]
        for ends, sign in ends_and_signs:
            corner = tuple(map(getitem, spans, ends))
            corners[corner] += sign * count
    return not any(corners.values())


def _divided_dims(record: TensorRecord) -> list[int]:
    """Return the dimensions along which some piece does not span the tensor."""
    return [d for d, size in enumerate(record.shape) if any(piece.box[d] != (0, size) for piece in record.pieces)]


def _cover_problem(name: str, record: TensorRecord) -> str:
    """Return how the boxes of a tensor overlap or leave gaps."""
    dims = _divided_dims(record)
    if len(dims) > _MAX_DIVIDED_DIMS:
        return f"tensor {name!r} is divided along {len(dims)} dimensions; allowed are {_MAX_DIVIDED_DIMS}"
    overlapping = _first_overlap(record.pieces)
    if overlapping is not None:
        boxes = " and ".join(f"{show_box(piece.box)} in {piece.file}" for piece in overlapping)
        return f"tensor {name!r} has pieces that overlap: {boxes}"
    tensor = f"tensor {name!r} of shape {record.shape}"
    expected = math.prod(record.shape)
    covered = sum(math.prod(size_of(piece.box)) for piece in record.pieces)
    if covered >= expected:
        return f"{tensor} has pieces that overlap: they hold {covered} elements, not {expected}"
    boxes = ", ".join(show_box(piece.box) for piece in record.pieces[:4]) or "none"
    return f"{tensor} has gaps: its boxes ({boxes}) hold {covered} of {expected} elements"


def _first_overlap(pieces: tuple[Piece, ...]) -> tuple[Piece, Piece] | None:
    """Return two overlapping pieces, if a bounded sweep along the most divided dimension finds them."""
    if not pieces or not pieces[0].box:  # a tensor without dimensions has one element
        return (pieces[0], pieces[1]) if len(pieces) > 1 else None
    dim = max(range(len(pieces[0].box)), key=lambda d: len({piece.box[d][0] for piece in pieces}))
    active: list[Piece] = []  # pieces that reach past the sweep's position
    compared = 0
    for piece in sorted(pieces, key=lambda piece: piece.box[dim]):
        active = [other for other in active if other.box[dim][1] > piece.box[dim][0]]
        for other in active:
            if intersect(piece.box, other.box) is not None:
                return other, piece
        active.append(piece)
        compared += len(active)
        if compared > _MAX_COMPARED:
            return None
    return None


def byte_gaps_in_files(manifest: Manifest) -> dict[tuple[str, int], int]:
    """Return (file, byte) of each piece's start and each file's end -> bytes since the end of the previous piece.

    Negative if pieces overlap.
    """
    gaps = {}
    ends = dict.fromkeys(manifest.files, 0)  # of the last piece in each file so far
    pieces = [piece for record in manifest.tensors.values() for piece in record.pieces]
    for piece in sorted(pieces, key=lambda piece: (piece.file, piece.offset)):
        gaps[piece.file, piece.offset] = piece.offset - ends[piece.file]
        ends[piece.file] = piece.offset + piece.nbytes
    for file, nbytes in manifest.files.items():
        gaps[file, nbytes] = nbytes - ends[file]
    return gaps


def _file_problems(manifest: Manifest) -> list[str]:
    """Return the bytes of a file that are in two pieces, or in none though no alignment needs them."""
    problems = []
    for (file, position), gap in byte_gaps_in_files(manifest).items():
        allowed = 0 if position == manifest.files[file] else ALIGNMENT - 1  # a file ends with its last piece
        if 0 <= gap <= allowed:
            continue
        owners = "no piece" if gap > 0 else "two pieces"
        problems.append(f"file {file!r}: {abs(gap)} bytes up to byte {position - min(0, gap)} belong to {owners}")
    return problems


def state_problems(value: Any, path: str = "state") -> list[str]:
    """Return the values that JSON cannot hold unchanged: other types, keys that are not text, NaN and infinity."""
    problems = []
    if isinstance(value, dict):
        for key in value:
            if not isinstance(key, str):
                problems.append(f"{path} has the key {key!r}; keys are text in JSON")
        for key, inner in value.items():
            problems += state_problems(inner, f"{path}[{key!r}]")
    elif isinstance(value, list):
        for i, inner in enumerate(value):
            problems += state_problems(inner, f"{path}[{i}]")
    else:
        is_plain = value is None or isinstance(value, str | int)
        if not is_plain and not (isinstance(value, float) and math.isfinite(value)):
            problems.append(f"{path} is {value!r:.40} ({type(value).__name__}), which plain JSON cannot hold")
    return problems


def show_box(box: Box) -> str:
    """Return the box as text: `[0:4, 8:16]`."""
    return f"[{', '.join(f'{start}:{stop}' for start, stop in box)}]"
