"""Choices that a forward makes, kept for its recomputation in the backward.

A recomputation computes equal bits from equal bits, but not on every device and in every kernel: a token whose best experts are
nearly tied might be sent elsewhere the second time, and the backward would find tensors of other shapes. So integers that decide
are computed once:

    ids = keys.choices.of(lambda: choose(scores))
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

T = TypeVar("T")


@dataclass
class _Run:
    """A forward of a part that is recomputed, or its recomputation."""

    values: list[Any]
    is_recomputation: bool
    position: int = 0


class KeptChoices:
    """The choices of the forwards that are running, the innermost last."""

    def __init__(self) -> None:
        self._runs: list[_Run] = []

    def of(self, compute: Callable[[], T]) -> T:
        """Return compute(), or in a recomputation what it returned in the forward. Calls are in one order in both."""
        value, is_known = None, False
        for run in reversed(self._runs):
            if run.is_recomputation and not is_known:
                value, is_known = run.values[run.position], True
        if not is_known:
            value = compute()
        for run in self._runs:
            if run.is_recomputation:
                run.position += 1
            else:
                run.values.append(value)
        return value

    @contextmanager
    def running(self, values: list[Any], *, is_recomputation: bool) -> Iterator[None]:
        """Inside runs a forward, whose choices go to `values`, or its recomputation, which takes them."""
        self._runs.append(_Run(values, is_recomputation))
        try:
            yield
        finally:
            self._runs.pop()
