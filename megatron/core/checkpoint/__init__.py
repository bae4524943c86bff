"""Checkpoints: raw tensor files and one JSON manifest of boxes, written by one layout and read by any other.

Names load on first use, so that `format`, which says what lies on disk, can be imported without torch.
"""

import importlib
from typing import Any

_HOME = {
    "CheckpointError": "format",
    "LocalTensor": "local_tensor",
    "save_checkpoint": "save",
    "Checkpoint": "load",
    "open_checkpoint": "load",
}
__all__ = list(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted(_HOME)
