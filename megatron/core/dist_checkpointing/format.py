"""The format of a checkpoint: raw tensor files, and one JSON manifest with the place of each box of each tensor. No torch.

    <root>/latest_checkpointed_iteration.txt      100
    <root>/iter_0000100/manifest.json             every piece with its place and hash, and the state of the run
    <root>/iter_0000100/rank_00000.bin            pieces end to end, each starting at a multiple of 64 bytes

A piece is one box of one tensor: its elements in row-major order, hashed with SHA-256. Every byte of a file belongs to a
piece,
or is a zero that aligns the next. The layout of the run is not recorded: a reader intersects its own boxes with the
saved boxes.
The manifest ends in its own hash, which also protects the state. Nothing is unpickled. A manifest may be hostile:
checking it
takes time linear in its length, except for one sort.
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

from megatron.core.sharding.boxes import Box, intersect, is_within, size_of

FORMAT, FORMAT_VERSION = "megatron-boxes", 1
MANIFEST = "manifest.json"
LATEST = "latest_checkpointed_iteration.txt"
PARTIAL, REPLACED = ".partial", ".replaced"
SPOILED = ".damaged"
ALIGNMENT = 64  # bytes: a cache line, so that a memory map of a piece suits every dtype and vector width

ITEM_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "int64": 8, "int32": 4, "uint8": 1, "bool": 1}

DAMAGED = "the checkpoint is damaged or was edited; load another iteration or restore this file from a copy"
NOT_SEEN = "every rank must see the folder; is it on a file system that all ranks share?"
_SHOWN = 10  # problems per message: a wrong layout makes one for every tensor
_MOST_DIMS, _MOST_CUT = 64, 6  # dimensions of a tensor (torch has no more), and of those in which it is divided
_MOST_NAME = 255  # bytes of a file's name, on every common file system
_MOST_COMPARED = 100_000  # pairs of boxes, to name two that overlap


class CheckpointError(ValueError):
    """A checkpoint cannot be written or read: the file, the problems, the remedy."""

    def __init__(self, file: Path | str, wrong: str | list[str], advice: str):
        self.file, self.advice = file, advice
        self.wrong = wrong
        problems = [wrong] if isinstance(wrong, str) else wrong
        shown = problems[:_SHOWN] + [f"and {len(problems) - _SHOWN} more"] * (len(problems) > _SHOWN)
        lines = "".join(f"\n  {problem}" for problem in shown)
        super().__init__(f"{file}: {shown[0]}; {advice}" if len(shown) == 1 else f"{file}:{lines}\n{advice}")


@dataclass(frozen=True)
class Piece:
    """One box of one tensor, and the place of its bytes."""

    box: Box
    file: str
    offset: int
    nbytes: int
    sha256: str


@dataclass(frozen=True)
class TensorRecord:
    """One global tensor: its pieces are disjoint and cover it."""

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
    return f"iter_{iteration:07d}"


def iteration_of(name: str) -> int | None:
    """The iteration in a folder name: `iter_0000100` -> 100; None for other names."""
    match = re.fullmatch(r"iter_([0-9]{7,})", name)
    return int(match[1]) if match else None


def file_name(rank: int, suffix: str) -> str:
    return f"rank_{rank:05d}{suffix}"


def item_bytes_of(shape: Iterable[int], dtype: str) -> int:
    return math.prod(shape) * ITEM_BYTES[dtype]


# ---------------------------------------------------------------- to JSON and back


def _sealed(body: str) -> str:
    """`body`, a JSON object without its closing brace, completed by its hash."""
    return f'{body},\n"sha256": "{hashlib.sha256(body.encode()).hexdigest()}"}}\n'


_SEAL_LENGTH = len(_sealed(""))


def to_json(manifest: Manifest) -> str:
    """The text of a manifest, one line per tensor."""
    fields = {"format": FORMAT, "version": FORMAT_VERSION, "byte_order": sys.byteorder}
    fields |= {name: value for name, value in vars(manifest).items() if name != "tensors"}
    head = ",\n".join(f"{json.dumps(key)}: {json.dumps(value, allow_nan=False)}" for key, value in fields.items())
    records = manifest.tensors.items()
    lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(record, default=vars)}" for name, record in records)
    return _sealed(f'{{{head},\n"tensors": {{\n{lines}\n}}')


def parse_manifest(text: str, file: Path | str) -> Manifest:
    """Parses a manifest and checks each value; `file` is for errors. The caller must also call `check_whole`."""
    try:
        raw = json.loads(text, object_pairs_hook=_without_repeats, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(file, f"is not JSON from beginning to end ({error})", DAMAGED) from error
    is_sealed = text == _sealed(text[:-_SEAL_LENGTH])
    _check_header(raw, file, is_sealed=is_sealed)
    if not is_sealed:
        raise CheckpointError(file, "does not match the sha256 in its last line", DAMAGED)
    try:
        manifest = _read(Manifest, raw, "the manifest")
    except _Malformed as error:
        raise CheckpointError(file, str(error), DAMAGED) from error
    if problems := _problems_of_names(manifest) + _problems_of_places(manifest):
        raise CheckpointError(file, problems, DAMAGED)
    return manifest


def _check_header(raw: Any, file: Path | str, *, is_sealed: bool) -> None:
    """is_sealed: the manifest is as it was written, so another format is no damage."""
    header = raw if isinstance(raw, dict) else {}
    for key, known, advice in (
        ("format", FORMAT, "convert it, or give another folder"),
        ("version", FORMAT_VERSION, "load it with the release that wrote it, or update this one"),
        ("byte_order", sys.byteorder, "load it on a machine like the one that wrote it"),
    ):
        if header.get(key) != known:
            wrong = f"has {key} {header.get(key)!r:.60}; this code and machine read {known!r}"
            raise CheckpointError(file, wrong, advice if is_sealed else DAMAGED)


def advice_after(error: Exception) -> str:
    """What to do where reading fails: a disk that cannot give its bytes back has lost them; anything else is no damage."""
    is_lost = not isinstance(error, OSError) or error.errno == errno.EIO
    return DAMAGED if is_lost else NOT_SEEN


class _Malformed(ValueError):
    """A value of the wrong type in a manifest; becomes a CheckpointError with the file's name."""


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(result := dict(pairs)) < len(pairs):
        raise ValueError("an object names one key twice")
    return result


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


_hints = cache(get_type_hints)


def _read(kind: Any, value: Any, at: str) -> Any:
    """`value` converted to `kind`, a dataclass above or the type of a field. Raises _Malformed if it does not fit."""
    if type(value) is kind and (kind is not int or 0 <= value < 1 << 63):
        return value
    inner = get_args(kind)
    if is_dataclass(kind):
        if isinstance(value, dict):
            parts = _hints(kind).items()
            return kind(**{name: _read(part, value.get(name), f"{at}, {name!r}") for name, part in parts})
        wanted = f"an object with {', '.join(_hints(kind))}"
    elif get_origin(kind) is tuple:
        if isinstance(value, list) and (inner[-1] is ... or len(value) == len(inner)):
            return tuple([_read(inner[0], one, at) for one in value])
        wanted = "a list" if inner[-1] is ... else f"a list of {len(inner)} integers from 0 up"
    elif get_origin(kind) is dict and inner[1] is not Any:
        if isinstance(value, dict):
            return {name: _read(inner[1], one, f"{at}, {name!r}") for name, one in value.items()}
        wanted = "an object"
    elif kind is int:
        wanted = "an integer from 0 up, in 64 bits"
    elif type(value) is get_origin(kind):
        return value
    else:
        wanted = f"of type {(get_origin(kind) or kind).__name__}"
    raise _Malformed(f"{at}: {value!r:.60} is not {wanted}")


# ---------------------------------------------------------------- what must hold between the values


def _problems_of_names(manifest: Manifest) -> list[str]:
    """Rejects file names that could leave the folder: a manifest may be hostile."""
    return [
        f"names the file {name!r:.60}; a file name is made of at most {_MOST_NAME} letters, digits, '_', '-' and '.', has no "
        "'..' and no folder"
        for name in manifest.files
        if ".." in name or len(name) > _MOST_NAME or not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]*", name)
    ]


def _problems_of_places(manifest: Manifest) -> list[str]:
    problems = []
    for name, record in manifest.tensors.items():
        if record.dtype not in ITEM_BYTES or len(record.shape) > _MOST_DIMS:
            has = f"dtype {record.dtype!r} and {len(record.shape)} dimensions"
            problems.append(f"tensor {name!r} has {has}; allowed are {', '.join(ITEM_BYTES)}, and {_MOST_DIMS}")
            continue
        for piece in record.pieces:
            at = f"tensor {name!r}, box {show_box(piece.box)}"
            if not is_within(piece.box, record.shape):
                problems.append(f"{at} is not a box within shape {record.shape}")
            elif piece.nbytes != item_bytes_of(size_of(piece.box), record.dtype):
                problems.append(f"{at} cannot have {piece.nbytes} bytes of {record.dtype}")
            elif piece.offset + piece.nbytes > manifest.files.get(piece.file, -1):
                end = piece.offset + piece.nbytes
                size = f"has {manifest.files[piece.file]}" if piece.file in manifest.files else "is not listed"
                problems.append(f"{at} ends at byte {end} of {piece.file!r}, which {size}")
            elif not re.fullmatch("[0-9a-f]{64}", piece.sha256):
                problems.append(f"{at} has {piece.sha256!r} where a sha256 in hexadecimal belongs")
    return problems


def check_whole(manifest: Manifest, file: Path | str, advice: str = DAMAGED) -> None:
    """Raises CheckpointError unless the pieces of each tensor are disjoint and cover it, and those of each file fill it."""
    broken = [(name, record) for name, record in manifest.tensors.items() if not is_filled(record)]
    problems = [_problem_of_cover(name, record) for name, record in broken[:_SHOWN]]
    problems += [name for name, _ in broken[_SHOWN:]]  # these are counted, not shown
    if problems := problems or _problems_of_files(manifest):
        raise CheckpointError(file, problems, advice)


def is_filled(record: TensorRecord) -> bool:
    """Whether the boxes of a tensor are disjoint and cover it, in time linear in their number.

    The indicator of a box is the cumulative sum, along each dimension, of +1 and -1 at its 2^d corners. So boxes cover each
    element once if and only if their signed corners sum to those of the whole tensor.
    """
    if 0 in record.shape:
        return not record.pieces
    cut = _divided(record)
    if len(cut) > _MOST_CUT:
        return False
    ends = [(end, (-1) ** sum(end)) for end in product((0, 1), repeat=len(cut))]
    corners: Counter[tuple[int, ...]] = Counter()
    whole = tuple((0, size) for size in record.shape)
    for box, count in [*((piece.box, 1) for piece in record.pieces), (whole, -1)]:
        spans = [box[dim] for dim in cut]
        for end, sign in ends:
            corners[tuple(map(getitem, spans, end))] += sign * count
    return not any(corners.values())


def _divided(record: TensorRecord) -> list[int]:
    """The dimensions along which some piece does not span the tensor."""
    return [d for d, size in enumerate(record.shape) if any(piece.box[d] != (0, size) for piece in record.pieces)]


def _problem_of_cover(name: str, record: TensorRecord) -> str:
    if len(cut := _divided(record)) > _MOST_CUT:
        return f"tensor {name!r} is divided along {len(cut)} dimensions; allowed are {_MOST_CUT}"
    if pair := _first_overlap(record.pieces):
        boxes = " and ".join(f"{show_box(piece.box)} in {piece.file}" for piece in pair)
        return f"tensor {name!r} has pieces that overlap: {boxes}"
    total, at = math.prod(record.shape), f"tensor {name!r} of shape {record.shape}"
    held = sum(math.prod(size_of(piece.box)) for piece in record.pieces)
    if held >= total:
        return f"{at} has pieces that overlap: they hold {held} elements, not {total}"
    boxes = ", ".join(show_box(piece.box) for piece in record.pieces[:4]) or "none"
    return f"{at} has gaps: its boxes ({boxes}) hold {held} of {total} elements"


def _first_overlap(pieces: tuple[Piece, ...]) -> tuple[Piece, Piece] | None:
    """Two overlapping pieces, if a bounded sweep along the most divided dimension finds them."""
    if not pieces or not pieces[0].box:  # a tensor without dimensions has one element
        return (pieces[0], pieces[1]) if len(pieces) > 1 else None
    dim = max(range(len(pieces[0].box)), key=lambda d: len({piece.box[d][0] for piece in pieces}))
    behind: list[Piece] = []  # pieces that reach past the sweep's position
    compared = 0
    for piece in sorted(pieces, key=lambda piece: piece.box[dim]):
        behind = [other for other in behind if other.box[dim][1] > piece.box[dim][0]]
        for other in behind:
            if intersect(piece.box, other.box) is not None:
                return other, piece
        behind.append(piece)
        if (compared := compared + len(behind)) > _MOST_COMPARED:
            return None
    return None


def gaps_of(manifest: Manifest) -> dict[tuple[str, int], int]:
    """(file, byte) of each piece's start and each file's end -> the gap to the end of the previous piece in bytes.

    Negative if pieces overlap.
    """
    ends, gaps = dict.fromkeys(manifest.files, 0), {}
    pieces = (piece for record in manifest.tensors.values() for piece in record.pieces)
    for piece in sorted(pieces, key=lambda piece: (piece.file, piece.offset)):
        gaps[piece.file, piece.offset] = piece.offset - ends[piece.file]
        ends[piece.file] = piece.offset + piece.nbytes
    return gaps | {(file, nbytes): nbytes - ends[file] for file, nbytes in manifest.files.items()}


def _problems_of_files(manifest: Manifest) -> list[str]:
    """Bytes of a file in two pieces, or in none and more than alignment needs."""
    return [
        f"file {file!r}: {abs(gap)} bytes up to byte {at - min(0, gap)} belong to "
        + ("no piece" if gap > 0 else "two pieces")
        for (file, at), gap in gaps_of(manifest).items()
        if gap < 0 or gap >= (1 if at == manifest.files[file] else ALIGNMENT)
    ]


def state_problems(value: Any, at: str = "state") -> list[str]:
    """Values that JSON cannot hold unchanged: other types, keys that are not text, NaN and infinity."""
    if isinstance(value, dict):
        keys = [f"{at} has the key {key!r}; keys are text in JSON" for key in value if not isinstance(key, str)]
        return keys + [problem for key, inner in value.items() for problem in state_problems(inner, f"{at}[{key!r}]")]
    if isinstance(value, list):
        return [problem for i, inner in enumerate(value) for problem in state_problems(inner, f"{at}[{i}]")]
    if value is None or isinstance(value, str | int) or (isinstance(value, float) and math.isfinite(value)):
        return []
    return [f"{at} is {value!r:.40} ({type(value).__name__}), which plain JSON cannot hold"]


def show_box(box: Box) -> str:
    """`[0:4, 8:16]`"""
    return f"[{', '.join(f'{start}:{stop}' for start, stop in box)}]"
