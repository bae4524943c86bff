"""Weight gradients put off: what lets a schedule fill its bubble with work that nobody waits for.

A linear layer's backward computes the gradient of its input, which the stage before waits for, and that of its weight,
which nobody waits for until the end of the step (arXiv:2401.10241, section 2). Layers hold the store from construction:
a backward may run on another thread, where a global would not be found.
"""

import contextlib
from collections.abc import Callable, Iterator

Work = Callable[[], None]


class WeightGradStore:
    """Runs the work that it is given at once, or, while somebody collects, keeps it for them."""

    def __init__(self) -> None:
        self._kept: list[Work] | None = None

    @property
    def is_collecting(self) -> bool:
        return self._kept is not None

    def keep(self, work: Work) -> None:
        """Put `work` with the rest; somebody must be collecting."""
        assert self._kept is not None, "nobody collects weight gradients"
        self._kept.append(work)

    @contextlib.contextmanager
    def collect(self) -> Iterator[list[Work]]:
        """The weight gradients that backwards inside the block put off; whoever collects must run them, in order."""
        assert self._kept is None, "weight gradients are being collected already"
        self._kept = kept = []
        try:
            yield kept
        finally:
            self._kept = None
