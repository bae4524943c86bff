"""Deferred weight gradients: a schedule fills its bubble with them.

A linear layer's backward computes the gradient of its input, which the previous stage waits for, and that of its
weight, which is not needed until the end of the step (arXiv:2401.10241, section 2). Layers hold the store from their
construction: a backward may run on another thread, where a global is not found.
"""

import contextlib
from collections.abc import Callable, Iterator

Work = Callable[[], None]


class WeightGradStore:
    """Keeps deferred work while a schedule collects it."""

    def __init__(self) -> None:
        self._kept: list[Work] | None = None

    @property
    def is_collecting(self) -> bool:
        return self._kept is not None

    def keep(self, work: Work) -> None:
        """Defer `work`. A `collect` must be open."""
        assert self._kept is not None, "no collect() is open for weight gradients"
        self._kept.append(work)

    @contextlib.contextmanager
    def collect(self) -> Iterator[list[Work]]:
        """The weight gradients that backwards inside the block defer. The caller must run them, in order."""
        assert self._kept is None, "another collect() of weight gradients is open"
        self._kept = kept = []
        try:
            yield kept
        finally:
            self._kept = None
