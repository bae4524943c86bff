import gc
import os
import sys
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

import pytest

# Thousands of tests are collected, of which none is garbage: the collector, which would walk through them dozens of times, comes seldom.
gc.set_threshold(100_000)

TESTS = Path(__file__).parent
SUPPORT = TESTS / "support"
sys.path[:0] = [str(folder) for folder in (TESTS.parent, SUPPORT, SUPPORT / "exchange", TESTS / "campaigns", TESTS)]


# The folder of a package in tests/unit or tests/ranks -> the marker of its tests, where another word is shorter.
MARKERS = {
    "pipeline_parallel": "pipeline",
    "tensor_parallel": "tensor",
    "context_parallel": "context",
    "dist_checkpointing": "checkpoint",
    "distributed": "zero",
}


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """One thread each. Without a GPU the tests in tests/gpu are skipped, and say so; GPU_TESTS_ON=cpu runs them nevertheless."""
    of_gpu = []
    for path, of_file in groupby(items, lambda item: item.path):
        inside = path.relative_to(TESTS).parts if path.is_relative_to(TESTS) else ("elsewhere",)
        if inside[0] in ("unit", "ranks") and len(inside) == 3:
            for item in of_file:
                item.add_marker(MARKERS.get(inside[1], inside[1]))
        elif inside[0] == "gpu":
            of_gpu += of_file
    import torch  # here, since the process that hands out the tests to the others has no use for it and would keep them waiting
    from fast_set import leave_cases

    torch.set_num_threads(1)
    leave_cases(items)
    if torch.cuda.is_available() or os.environ.get("GPU_TESTS_ON"):
        return
    for item in of_gpu:
        item.add_marker(pytest.mark.skip(reason="needs a GPU"))


_PRECISION = pytest.StashKey[str]()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> Iterator[None]:
    item.stash[_PRECISION] = _products()
    _freeze_before(item)
    yield


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item) -> Iterator[None]:
    """A --bf16 run that a test begins and does not end would round the factors of every float32 product of the tests after it."""
    yield
    before, after = item.stash[_PRECISION], _products()
    if after != before:
        sys.modules["torch"].backends.mkldnn.matmul.fp32_precision = before
        pytest.fail(
            f"torch.backends.mkldnn.matmul.fp32_precision was {before!r} before this test, and is {after!r} after it"
        )


def _products() -> str:
    """How precisely oneDNN computes float32 products in this process; where torch is not loaded, as it begins."""
    torch = sys.modules.get("torch")
    return torch.backends.mkldnn.matmul.fp32_precision if torch else "none"


def pytest_collection_finish() -> None:
    """Thousands of collected tests live to the end: let the garbage collector not walk through them again and again."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(60_000)


_frozen_for: Path | None = (
    None  # the file of tests before which the garbage collector was last told to leave out what there is
)


def _freeze_before(item: pytest.Item) -> None:
    """Modules and caches that the tests of a file have loaded live on: later collections would walk through them each time.

    The tests of offloaded activations, which collect, took 61 s of processor time after others, and 7 s so.
    """
    global _frozen_for
    if item.path != _frozen_for:
        gc.collect()
        gc.freeze()
        _frozen_for = item.path
