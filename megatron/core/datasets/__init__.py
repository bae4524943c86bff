"""Token files on disk, the order in which training sees them, and batches.

Names load on first use, so that the pure files (`index_map`, `indexed`) can be imported without torch. The function
`batches` is not among them: its module has the same name.
"""

import importlib
from typing import Any

_HOME = {
    "DataConfig": "data_config",
    "IndexedDataset": "indexed",
    "IndexedDatasetWriter": "indexed",
    "requested_samples": "index_map",
    "GPTDataset": "gpt",
    "MockGPTDataset": "gpt",
    "build_gpt_datasets": "gpt",
}
__all__ = list(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
