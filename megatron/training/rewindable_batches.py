"""The batches of one step are cached, so that the step can be computed again."""

from collections.abc import Iterator
from typing import Any

from megatron.core.datasets.aux_loss_weight_from_next_microbatches import sum_if_known, tokens_of_batch


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

    def num_tokens(self, num_batches: int) -> float | None:
        """Return the sum of `loss_mask` over the next batches; None if they have none."""
        end = self._next + num_batches
        while len(self.kept) < end:
            self.kept.append(next(self._batches))
        return sum_if_known([tokens_of_batch(batch) for batch in self.kept[self._next : end]])

    def __iter__(self) -> "RewindableBatches":
        return self

    def __next__(self) -> Any:
        if self._next == len(self.kept):
            self.kept.append(next(self._batches))
        batch = self.kept[self._next]
        self._next += 1
        return batch
