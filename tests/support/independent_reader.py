"""Reads a checkpoint by docs/checkpoint_format.md alone, with numpy, and checks all that the page promises. Imports nothing of the project.

iteration, state, tensors = read(folder)          tensors: name -> array of the elements' bits, in the whole tensor's shape
"""

import hashlib
import json
import math
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

BITS = {
    "float64": np.uint64,
    "float32": np.uint32,
    "bfloat16": np.uint16,
    "float16": np.uint16,
    "int64": np.uint64,
    "int32": np.uint32,
    "uint8": np.uint8,
    "bool": np.uint8,
}


class Tensor(NamedTuple):
    dtype: str
    bits: np.ndarray

    @property
    def values(self) -> np.ndarray:
        """As numbers; bfloat16 as the float32 whose upper half it is."""
        if self.dtype == "bfloat16":
            return (self.bits.astype(np.uint32) << 16).view(np.float32)
        return self.bits.view(self.dtype)


class Contents(NamedTuple):
    iteration: int
    state: dict[str, Any]
    tensors: dict[str, Tensor]


def latest(root: Path) -> Path:
    return root / f"iter_{int((root / 'latest_checkpointed_iteration.txt').read_text()):07d}"


def read(folder: Path) -> Contents:
    """Raises AssertionError where the folder is not as the page says."""
    text = (folder / "manifest.json").read_bytes()
    body, _, seal = text.rpartition(b',\n"sha256": "')
    assert seal == hashlib.sha256(body).hexdigest().encode() + b'"}\n', "the manifest's own hash"
    manifest = json.loads(text)
    assert (manifest["format"], manifest["version"], manifest["byte_order"]) == ("megatron-boxes", 1, "little")
    assert folder.name == f"iter_{manifest['iteration']:07d}"
    content = {name: (folder / name).read_bytes() for name in manifest["files"]}
    assert {name: len(data) for name, data in content.items()} == manifest["files"]
    assert {path.name for path in folder.iterdir()} == {"manifest.json", *content}, "no other file"
    tensors, spans = {}, {name: [] for name in content}
    for name, record in manifest["tensors"].items():
        kind = np.dtype(BITS[record["dtype"]]).newbyteorder("<")
        bits, seen = np.zeros(record["shape"], kind), np.zeros(record["shape"], np.uint8)
        for piece in record["pieces"]:
            start, size = piece["offset"], piece["nbytes"]
            data = content[piece["file"]][start : start + size]
            assert hashlib.sha256(data).hexdigest() == piece["sha256"], f"{name} {piece['box']}"
            assert size == kind.itemsize * math.prod(stop - begin for begin, stop in piece["box"])
            where = tuple(slice(begin, stop) for begin, stop in piece["box"])
            bits[where] = np.frombuffer(data, kind).reshape(bits[where].shape)
            seen[where] += 1
            spans[piece["file"]].append((start, start + size))
        assert (seen == 1).all(), f"the pieces of {name} neither overlap nor leave a gap"
        tensors[name] = Tensor(record["dtype"], bits)
    for file, found in spans.items():
        _check_places(file, content[file], sorted(found))
    return Contents(manifest["iteration"], manifest["state"], tensors)


def _check_places(file: str, data: bytes, spans: list[tuple[int, int]]) -> None:
    """Pieces follow one another, each at the next multiple of 64, zeros between them, to the last byte."""
    end = 0
    for start, stop in spans:
        assert start == -(-end // 64) * 64 and not any(data[end:start]), f"{file}, byte {start}"
        end = stop
    assert end == len(data), f"{file} ends with its last piece"


def differing(mine: dict[str, Tensor], theirs: dict[str, Tensor]) -> list[str]:
    """The names of tensors whose bits differ, or that one side lacks."""
    names = [*mine, *(name for name in theirs if name not in mine)]
    return [
        name
        for name in names
        if name not in mine
        or name not in theirs
        or mine[name].dtype != theirs[name].dtype
        or not np.array_equal(mine[name].bits, theirs[name].bits)
    ]
