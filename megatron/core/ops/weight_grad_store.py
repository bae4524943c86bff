"""Deferred weight gradients: a schedule fills its bubble with them.

A linear layer's backward computes dgrad, which the previous stage waits for, and wgrad, which is not needed until the
end of the step (zero bubble, arXiv:2401.10241, section 2). Layers get the store at their construction: a backward may
run on another thread, where a thread-local global is not found.
"""

import contextlib
from collections.abc import Callable, Iterator

Work = Callable[[], None]


class WeightGradStore:
    """Takes deferred weight gradients while a schedule collects them."""

    def __init__(self) -> None:
        self._collected: list[Work] | None = None

    @property
    def is_collecting(self) -> bool:
        return self._collected is not None

    def put(self, work: Work) -> None:
        """Defer `work`. A `collect` must be open."""
        assert self._collected is not None, "no collect() is open for weight gradients"
        self._collected.append(work)

    @contextlib.contextmanager
    def collect(self) -> Iterator[list[Work]]:
        """Collect the weight gradients that backwards inside the block defer. The caller must run them, in order."""
        assert self._collected is None, "another collect() of weight gradients is open"
        collected: list[Work] = []
        self._collected = collected
        try:
            yield collected
        finally:
            self._collected = None
