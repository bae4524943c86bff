"""Tiny models of each family, with odd sizes and every option on: what `record.py` gives transformers, and the tests give us.

Weights are made from the names and shapes of a folder alone, so that a record needs to hold none.
"""

import json
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np

SEED, LENGTH = 7, 14
_SIZES = {
    "vocab_size": 31,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
}
_BASE = _SIZES | {"num_key_value_heads": 2, "max_position_embeddings": 32, "rms_norm_eps": 1e-5}
_GPT2 = {"vocab_size": 31, "n_embd": 24, "n_layer": 3, "n_head": 6, "n_positions": 16, "layer_norm_epsilon": 1e-4}

CASES: dict[str, dict[str, Any]] = {
    "gpt2": {"model_type": "gpt2", **_GPT2},
    "gpt2-untied": {"model_type": "gpt2", **_GPT2, "n_inner": 36, "tie_word_embeddings": False},
    "llama": {"model_type": "llama", **_BASE},
    "llama-tied": {"model_type": "llama", **_BASE, "tie_word_embeddings": True, "head_dim": 6, "rope_theta": 5e5},
}


def ids() -> np.ndarray:
    """Two texts, [2, LENGTH]."""
    return np.random.RandomState(SEED).randint(0, 31, (2, LENGTH))


def weight(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Normal with deviation 0.3, norms around 1: small weights would hide a wrong option. In float32, which files can hold."""
    x = np.random.RandomState(zlib.crc32(name.encode()) ^ SEED).standard_normal(shape)
    is_norm = name.endswith(".weight") and len(shape) == 1
    return (1 + 0.5 * x if is_norm else 0.3 * x).astype(np.float32).astype(np.float64)


def read_record(name: str) -> dict[str, Any]:
    return json.loads((Path(__file__).parent / "records" / f"{name}.json").read_text())


def write_folder(root: Path, record: dict[str, Any], dtype: str = "F64") -> None:
    """The folder that transformers would write: its config.json, and its tensors in two files with an index.

    Written here and not by the product, which is to be tested.
    """
    root.mkdir(parents=True, exist_ok=True)
    (root / "config.json").write_text(json.dumps(record["config"]))
    names = sorted(record["shapes"])
    halves = {f"model-0000{i + 1}-of-00002.safetensors": names[i::2] for i in range(2)}
    for file, part in halves.items():
        header, data = {"__metadata__": {"format": "pt"}}, b""
        for tensor in part:
            shape = record["shapes"][tensor]
            values = weight(tensor, tuple(shape)).astype({"F64": "<f8", "F32": "<f4"}[dtype]).tobytes()
            header[tensor] = {"dtype": dtype, "shape": shape, "data_offsets": [len(data), len(data) + len(values)]}
            data += values
        text = json.dumps(header).encode()
        (root / file).write_bytes(struct.pack("<Q", len(text)) + text + data)
    index = {"metadata": {}, "weight_map": {tensor: file for file, part in halves.items() for tensor in part}}
    (root / "model.safetensors.index.json").write_text(json.dumps(index))


def read_tensors(root: Path) -> dict[str, tuple[str, list[int], bytes]]:
    """(dtype, shape, bytes) of each tensor of a folder, by name."""
    found = {}
    for path in sorted(root.glob("*.safetensors")):
        data = path.read_bytes()
        (length,) = struct.unpack("<Q", data[:8])
        for name, entry in json.loads(data[8 : 8 + length]).items():
            if name != "__metadata__":
                start, stop = entry["data_offsets"]
                found[name] = entry["dtype"], entry["shape"], data[8 + length + start : 8 + length + stop]
    return found
