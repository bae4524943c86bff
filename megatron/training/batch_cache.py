"""The batches of one step, kept to be read again."""

from collections.abc import Iterator
from typing import Any


class KeptBatches:
    """An iterator that keeps what it has given since `begin`; after `rewind` it gives that again, then goes on."""

    def __init__(self, batches: Iterator):
        self._batches = batches
        self.kept: list[Any] = []
        self._at = 0

    def begin(self) -> None:
        """A step begins: forget the one before."""
        self.kept, self._at = [], 0

    def rewind(self) -> None:
        self._at = 0

    def __iter__(self) -> "KeptBatches":
        return self

    def __next__(self) -> Any:
        if self._at == len(self.kept):
            self.kept.append(next(self._batches))
        self._at += 1
        return self.kept[self._at - 1]
