"""Batches whose tokens can be counted before they are used, for auxiliary losses (`core/ops/aux_loss_collector.py`).

The loss of a step is a mean over its tokens. The number of tokens that are not masked is the weight of an auxiliary loss,
whose first backward comes before the last forward.
"""

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable


@runtime_checkable
class CountsTokens(Protocol):
    """A data iterator that knows how many tokens its next batches have."""

    def num_tokens(self, num_batches: int) -> float | None:
        """Return the tokens that the loss will count in the next batches, over whole samples; None: unknown.

        A rank that has a part of each sample counts the whole samples.
        """


def tokens_of_batch(batch: Any) -> float | None:
    """Return the sum of a batch's `loss_mask`, of any shape; None if the batch has none."""
    if not isinstance(batch, Mapping) or "loss_mask" not in batch:
        return None
    return float(batch["loss_mask"].sum())


def sum_if_known(counts: Sequence[float | None]) -> float | None:
    """Return the sum, or None if a count is unknown."""
    return None if None in counts else sum(counts)


class CountedBatches:
    """An iterator over `batches` that reads ahead to count the tokens of a step.

    count(batch) -> the tokens that the loss counts in it, over whole samples.
    """

    def __init__(self, batches: Iterator, count: Callable[[Any], float | None] = tokens_of_batch):
        self._batches = batches
        self._count = count
        self._read: deque[Any] = deque()  # batches that `num_tokens` has read and nobody has used

    def __iter__(self) -> "CountedBatches":
        return self

    def __next__(self) -> Any:
        return self._read.popleft() if self._read else next(self._batches)

    def num_tokens(self, num_batches: int) -> float | None:
        """Return the tokens in the next `num_batches` batches. None if `count` does not know."""
        while len(self._read) < num_batches:
            self._read.append(next(self._batches))
        return sum_if_known([self._count(batch) for batch, _ in zip(self._read, range(num_batches))])
