"""Deferred weight gradients, with which zero-bubble schedules fill idle time (arXiv:2401.10241, section 2).

A linear layer's backward computes its input gradient, which the previous stage needs, and its weight gradient, which is not
needed before the end of the step. Layers hold the store from construction, since autograd may run a backward on another thread.
"""

import contextlib
from collections.abc import Callable, Iterator

Work = Callable[[], None]


class WeightGradStore:
    """Collects deferred weight gradients while `collect` is open; otherwise layers compute them at once."""

    def __init__(self) -> None:
        self._kept: list[Work] | None = None

    @property
    def is_collecting(self) -> bool:
        return self._kept is not None

    def keep(self, work: Work) -> None:
        """Defers `work`; `collect` must be open."""
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
