"""Megatron's access to the package grouped_gemm, for scripts; nothing here uses it."""

from importlib import import_module
from importlib.util import find_spec
from typing import Any


def grouped_gemm_is_available() -> bool:
    """Return whether the package is installed."""
    return find_spec("grouped_gemm") is not None


def assert_grouped_gemm_is_available() -> None:
    """Raise AssertionError if the package is not installed."""
    assert grouped_gemm_is_available(), (
        "the package grouped_gemm is not installed; experts are multiplied one by one without"
    )


ops: Any = import_module("grouped_gemm").ops if grouped_gemm_is_available() else None
