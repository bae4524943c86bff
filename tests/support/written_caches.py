"""Index caches as Megatron-LM writes them."""

import hashlib
import json
from pathlib import Path

import numpy as np


def write_cache(folder, kind, split, description, arrays):
    """As Megatron names and writes it; returns the path without its ending."""
    text = json.dumps({"class": kind, **description}, indent=4)
    stem = folder / f"{hashlib.md5(text.encode()).hexdigest()}-{kind}-{split}"
    folder.mkdir(exist_ok=True, parents=True)
    Path(f"{stem}-description.txt").write_text(text)
    for name, array in arrays.items():
        np.save(f"{stem}-{name}.npy", array)
    return str(stem)
