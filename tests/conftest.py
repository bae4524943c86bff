import sys
from pathlib import Path

import pytest
import torch

sys.path[:0] = [str(Path(__file__).parent.parent), str(Path(__file__).parent)]
torch.set_num_threads(1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Without a GPU the tests in tests/gpu are skipped, and say so."""
    if torch.cuda.is_available():
        return
    for item in items:
        if Path(__file__).parent / "gpu" in item.path.parents:
            item.add_marker(pytest.mark.skip(reason="needs a GPU"))
