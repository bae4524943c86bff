"""The batches of one step are cached, so that the step can be computed again."""

from collections.abc import Iterator
from typing import Any


class RewindableBatches:
    """An iterator that caches what it returned since `begin`.

    After `rewind` it returns the cached batches again, then continues with new ones.
    """

    def __init__(self, batches: Iterator):
        self._batches = batches
        self.kept: list[Any] = []  # the batches of this step
        self._next = 0  # index into `kept`

    def begin(self) -> None:
        """Begin a step: drop the batches of the step before."""
        self.kept = []
        self._next = 0

    def rewind(self) -> None:
        self._next = 0

    def __iter__(self) -> "RewindableBatches":
        return self

    def __next__(self) -> Any:
        if self._next == len(self.kept):
            self.kept.append(next(self._batches))
        batch = self.kept[self._next]
        self._next += 1
        return batch
