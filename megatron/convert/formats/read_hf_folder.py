"""What lies in a Hugging Face folder: its config.json, and the headers of its safetensors files. No torch.

A folder may be hostile: nothing of it is run, no pickle is read, and no path leads out of it.
"""

import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.convert.formats.safetensors_header import FETCH_AGAIN, TensorInFile, read_header, without_repeats
from megatron.core.base.dataclass_flags import ConfigError
from megatron.core.dist_checkpointing.format import LATEST, CheckpointError
from megatron.core.storage.file_layer import backend_of, exists, is_file, read_all, read_start

CONFIG, WEIGHTS = "config.json", "model.safetensors"
INDEX = f"{WEIGHTS}.index.json"
_PICKLED = ("pytorch_model.bin", "pytorch_model.bin.index.json")
_MOST_JSON, _CHUNK = 64 << 20, 16 << 20  # bytes


@dataclass(frozen=True)
class HFFolder:
    """What a folder holds, as the first rank has read it: plain JSON."""

    config: dict[str, Any]
    tensors: dict[str, TensorInFile]
    notes: tuple[str, ...] = ()


def is_hf_folder(root: Path) -> bool:
    """Whether a folder has a config.json, and no checkpoints of ours. A name that the system does not take is none."""
    try:
        return is_file(root / CONFIG) and not exists(root / LATEST)
    except OSError:
        return False


def read_hf_folder(root: Path) -> HFFolder:
    """The config and the headers of all files. Raises ConfigError or CheckpointError."""
    config = read_json(root / CONFIG)
    notes = []
    if "auto_map" in config or any(name.endswith(".py") for name in backend_of(root).names(root)):
        notes.append(f"{root} holds code of its own (auto_map, *.py), which is never run; its weights alone are read")
    if "quantization_config" in config:
        raise ConfigError(
            f"{root / CONFIG}: quantization_config: quantized weights are not read; give the unquantized model"
        )
    listed = _listed(root)
    tensors: dict[str, TensorInFile] = {}
    for file in dict.fromkeys(listed.values()) if listed else [WEIGHTS]:
        header = read_header(path_inside(root, file))
        for name, x in header.items():
            if listed and listed.get(name) != file:
                where = f"says {listed[name]}" if name in listed else "does not list it"
                raise CheckpointError(
                    root / file, f"holds tensor {name!r:.80}, and {INDEX} {where}", "fetch the folder again"
                )
            tensors[name] = x._replace(file=file)
    if lacking := [name for name in listed if name not in tensors]:
        wrong = f"lists {len(lacking)} tensors that its files lack, such as {lacking[0]!r:.80}"
        raise CheckpointError(root / INDEX, wrong, "fetch the folder again")
    return HFFolder(config, tensors, tuple(notes))


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object of a file, with all that is not JSON refused."""
    try:
        text = read_start(path, _MOST_JSON + 1) if is_file(path) else b""
        if len(text) > _MOST_JSON:
            raise ValueError(f"it has more than {_MOST_JSON} bytes")
    except (OSError, ValueError) as error:
        raise CheckpointError(path, f"cannot be read ({str(error)[:200]})", "fetch the folder again") from error
    return json_of(text, path)


def json_of(text: bytes, path: Path) -> dict[str, Any]:
    """A JSON object, with all that is not JSON refused. path: where it lies, for the CheckpointError."""
    try:
        found = json.loads(text.decode(), object_pairs_hook=without_repeats, parse_constant=_refused)
        if not isinstance(found, dict):
            raise ValueError("it is no object")
    except (ValueError, RecursionError) as error:
        raise CheckpointError(path, f"cannot be read ({str(error)[:200]})", "fetch the folder again") from error
    return found


def _refused(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _listed(root: Path) -> dict[str, str]:
    """The index: name of a tensor -> its file; empty for a folder with one file."""
    if is_file(root / WEIGHTS):
        return {}
    if not is_file(root / INDEX):
        pickled = [name for name in _PICKLED if exists(root / name)]
        has = f"holds {pickled[0]}, which is a pickle" if pickled else f"holds neither {WEIGHTS} nor {INDEX}"
        advice = "save it with safe_serialization=True" if pickled else "fetch the folder again, with its weights"
        raise CheckpointError(root, has, advice)
    listed = read_json(root / INDEX).get("weight_map")
    plain = r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,250}\.safetensors"
    if not isinstance(listed, dict) or not listed:
        raise CheckpointError(root / INDEX, "has no weight_map", "fetch the folder again")
    for name, file in listed.items():
        if not isinstance(file, str) or not re.fullmatch(plain, file) or ".." in file:
            wrong = f"says that {name!r:.80} lies in {file!r:.80}, which is no name of a file in this folder"
            raise CheckpointError(root / INDEX, wrong, "do not use this folder")
    return listed


def path_inside(root: Path, file: str) -> Path:
    """The path of a file of the folder; a link must stay in it, or lead to the blobs of the hub's cache around it."""
    path = root / file
    real, home = Path(os.path.realpath(path)), Path(os.path.realpath(root))
    allowed = [home, *([home.parent.parent / "blobs"] if home.parent.name == "snapshots" else [])]
    if not any(real.is_relative_to(one) for one in allowed):
        raise CheckpointError(path, f"is a link to {real}, outside of the folder", "do not use this folder")
    return path


def are_equal(root: Path, one: TensorInFile, other: TensorInFile) -> bool:
    """Whether two tensors of a folder have the same bytes."""
    if one[1:3] != other[1:3]:
        return False
    return all(one == other for one, other in zip(_chunks_of(root, one), _chunks_of(root, other)))


def _chunks_of(root: Path, x: TensorInFile) -> Iterator[bytearray]:
    path, done = root / x.file, 0
    with backend_of(path).open(path, "rb") as file:
        file.seek(x.start)
        while done < x.nbytes:
            chunk = bytearray(min(_CHUNK, x.nbytes - done))
            if read_all(file, memoryview(chunk), path) < len(chunk):
                raise CheckpointError(path, f"ends within a tensor of {x.nbytes} bytes", FETCH_AGAIN)
            done += len(chunk)
            yield chunk
