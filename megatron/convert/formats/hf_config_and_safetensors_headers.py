"""Read a Hugging Face folder: its config.json, and the headers of its safetensors files. No torch.

A folder may be hostile: nothing of it is run, no pickle is read, and no path out of it is followed.
"""

import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.convert.formats.safetensors_header import FETCH_AGAIN, TensorInFile, read_header, without_repeats
from megatron.core.base.dataclass_flags import ConfigError
from megatron.core.base.lfs_pointer import FETCH_LFS, LFS_POINTER, is_lfs_pointer
from megatron.core.dist_checkpointing.manifest_format import LATEST, CheckpointError
from megatron.core.storage.file_layer import backend_of, exists, is_file, read_all, read_start

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
INDEX = f"{WEIGHTS}.index.json"
_PICKLED = ("pytorch_model.bin", "pytorch_model.bin.index.json")
_ADAPTER = "adapter_config.json"  # of PEFT
_MOST_JSON = 64 << 20  # bytes
_CHUNK = 16 << 20  # bytes of a tensor that are compared at a time
_FILE_NAME = r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,250}\.safetensors"


@dataclass(frozen=True)
class HFFolder:
    """The content of a folder, but for the values of its tensors. Plain JSON, which the first rank broadcasts."""

    config: dict[str, Any]
    tensors: dict[str, TensorInFile]
    notes: tuple[str, ...] = ()


def has_hf_config(root: Path) -> bool:
    """Return whether a folder has a config.json, and no checkpoints of ours.

    False for a name that the system refuses.
    """
    try:
        return is_file(root / CONFIG) and not exists(root / LATEST)
    except OSError:
        return False


def read_hf_folder(root: Path) -> HFFolder:
    """Read the config and the headers of all files. Raises ConfigError or CheckpointError."""
    config = read_json(root / CONFIG)
    notes = []
    if "auto_map" in config or any(name.endswith(".py") for name in backend_of(root).names(root)):
        notes.append(f"{root} holds code of its own (auto_map, *.py), which is never run; its weights alone are read")
    if config.get("quantization_config") is not None and not is_mxfp4(config):
        raise ConfigError(
            f"{root / CONFIG}: quantization_config: quantized weights cannot be read; give the unquantized model"
        )
    if is_mxfp4(config):
        notes.append(
            f"{root} holds experts in MXFP4, which are read as bfloat16; a folder of the model is written in it"
        )
    index = _read_index(root)
    tensors: dict[str, TensorInFile] = {}
    files = dict.fromkeys(index.values()) if index else [WEIGHTS]
    for file in files:
        header = read_header(path_inside(root, file))
        for name, x in header.items():
            if index and index.get(name) != file:
                where = f"says {index[name]}" if name in index else "does not list it"
                raise CheckpointError(
                    root / file, f"holds tensor {name!r:.80}, and {INDEX} {where}", "fetch the folder again"
                )
            tensors[name] = x._replace(file=file)
    missing = [name for name in index if name not in tensors]
    if missing:
        wrong = f"lists {len(missing)} tensors that its files lack, such as {missing[0]!r:.80}"
        raise CheckpointError(root / INDEX, wrong, "fetch the folder again")
    return HFFolder(config, tensors, tuple(notes))


def is_mxfp4(config: Mapping[str, Any]) -> bool:
    """Return whether a config.json describes a GPT-OSS with experts in MXFP4, the only packed weights that are read."""
    quantization = config.get("quantization_config")
    is_packed = isinstance(quantization, dict) and quantization.get("quant_method") == "mxfp4"
    return is_packed and config.get("model_type") == "gpt_oss"


def read_json(path: Path) -> dict[str, Any]:
    """Read a file that holds a JSON object, and Infinity, as Python writes it.

    Raises CheckpointError, also for NaN and repeated keys.
    """
    try:
        text = read_start(path, _MOST_JSON + 1) if is_file(path) else b""
        if len(text) > _MOST_JSON:
            raise ValueError(f"it has more than {_MOST_JSON} bytes, which is too long")
    except (OSError, ValueError) as error:
        raise CheckpointError(path, f"cannot be read ({str(error)[:200]})", "fetch the folder again") from error
    return json_of(text, path)


def json_of(text: bytes, path: Path) -> dict[str, Any]:
    """Parse a JSON object as `read_json` does. path: the file, for the CheckpointError."""
    if is_lfs_pointer(text):
        raise CheckpointError(path, LFS_POINTER, FETCH_LFS)
    try:
        value = json.loads(text.decode(), object_pairs_hook=without_repeats, parse_constant=_infinity)
        if not isinstance(value, dict):
            raise ValueError("it is not an object")
    except (ValueError, RecursionError) as error:
        raise CheckpointError(path, f"cannot be read ({str(error)[:200]})", "fetch the folder again") from error
    return value


def _infinity(name: str) -> float:
    if name == "NaN":
        raise ValueError("NaN is not JSON")
    return float(name)


def _read_index(root: Path) -> dict[str, str]:
    """Return name of a tensor -> its file; {} for a folder with one file of weights."""
    if is_file(root / WEIGHTS):
        return {}
    if not is_file(root / INDEX):
        adapter = adapter_hint(root)
        if adapter is not None:
            raise ConfigError(f"{root} {adapter}")
        for name in _PICKLED:
            if exists(root / name):
                raise CheckpointError(root, f"holds {name}, which is a pickle", "save it with safe_serialization=True")
        wrong = f"holds neither {WEIGHTS} nor {INDEX}"
        raise CheckpointError(root, wrong, "fetch the folder again, with its weights")
    index = read_json(root / INDEX).get("weight_map")
    if not isinstance(index, dict) or not index:
        raise CheckpointError(root / INDEX, "has no weight_map", "fetch the folder again")
    for name, file in index.items():
        if not isinstance(file, str) or not re.fullmatch(_FILE_NAME, file) or ".." in file:
            wrong = f"says that {name!r:.80} is in {file!r:.80}, which is not the name of a file in this folder"
            raise CheckpointError(root / INDEX, wrong, "do not use this folder")
    return index


def adapter_hint(root: Path) -> str | None:
    """Return what to do with a folder of PEFT, which holds an adapter and no model; None for any other folder."""
    names = backend_of(root).names(root)
    has_weights = any(name.endswith(".safetensors") and not name.startswith("adapter_") for name in names)
    if _ADAPTER not in names or has_weights:
        return None
    try:
        base = json.loads(read_start(root / _ADAPTER, 1 << 20)).get("base_model_name_or_path")
    except (ValueError, AttributeError, RecursionError, OSError):
        base = None
    of_base = f" of {base!r:.100}" if isinstance(base, str) else ""
    return (
        f"holds an adapter of PEFT{of_base}, and not the model; merge it in the environment that made it "
        "(merge_and_unload, then save_pretrained of model and tokenizer), and give that folder"
    )


def path_inside(root: Path, file: str) -> Path:
    """Return the path of a file of the folder. Raises CheckpointError for a link that leads out of it.

    The hub's cache has links from models--NAME/snapshots/REVISION to models--NAME/blobs, which are allowed.
    """
    path = root / file
    target = Path(os.path.realpath(path))
    folder = Path(os.path.realpath(root))
    allowed = [folder]
    if folder.parent.name == "snapshots":
        allowed.append(folder.parent.parent / "blobs")
    if not any(target.is_relative_to(parent) for parent in allowed):
        raise CheckpointError(path, f"is a link to {target}, outside of the folder", "do not use this folder")
    return path


def are_equal(root: Path, x: TensorInFile, y: TensorInFile) -> bool:
    """Return whether two tensors of a folder have the same dtype, shape and bytes; reads both."""
    if x.dtype != y.dtype or x.shape != y.shape:
        return False
    return all(x_bytes == y_bytes for x_bytes, y_bytes in zip(_chunks_of(root, x), _chunks_of(root, y)))


def _chunks_of(root: Path, x: TensorInFile) -> Iterator[bytearray]:
    """Yield the bytes of a tensor, a chunk at a time."""
    path = root / x.file
    done = 0
    with backend_of(path).open(path, "rb") as file:
        file.seek(x.start)
        while done < x.nbytes:
            chunk = bytearray(min(_CHUNK, x.nbytes - done))
            if read_all(file, memoryview(chunk), path) < len(chunk):
                raise CheckpointError(path, f"ends within a tensor of {x.nbytes} bytes", FETCH_AGAIN)
            done += len(chunk)
            yield chunk
