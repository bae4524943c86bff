"""What a run will read of each data set, in numbers: tokens, samples, passes over the data, bytes. Nothing is built."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megatron.core.datasets.index_map import IndexRequest, split_tokens
from megatron.core.datasets.mmap_indexed_dataset import IndexedDataset

_LINES = 20  # of the data sets of one split that are listed at the start of a run


@dataclass(frozen=True)
class Reading:
    """A data set's part in one split of a run. documents, tokens, bytes: what is there, in that split."""

    prefix: str
    documents: int
    tokens: int
    bytes: int
    samples: int  # that the run reads
    seq_length: int

    @property
    def drawn(self) -> int:
        """Tokens that the run reads."""
        return self.samples * self.seq_length

    @property
    def passes(self) -> float:
        """How often the run reads each token, on average."""
        return self.drawn / self.tokens if self.tokens else math.inf


def reading(indexed: IndexedDataset, request: IndexRequest, samples: int) -> Reading:
    """What a run reads of a file that is asked for `request`, when it takes so many of the samples."""
    documents = int(np.diff(np.searchsorted(indexed.document_indices[:-1], request.ids_range))[0])
    tokens = split_tokens(indexed.sequence_lengths, request)
    return Reading(indexed.prefix, documents, tokens, tokens * indexed.dtype.itemsize, samples, request.seq_length)


def total(readings: Sequence[Reading]) -> Reading:
    """All of them as one."""
    sums = (sum(getattr(r, name) for r in readings) for name in ("documents", "tokens", "bytes", "samples"))
    return Reading("all", *sums, readings[0].seq_length)


def lines(split: str, readings: Sequence[Reading]) -> list[str]:
    """One line a data set, of not too many, for the start of a run."""
    whole = sum(r.samples for r in readings)
    shown = [
        f"{split} data: {100 * r.samples / max(whole, 1):.2f}% {r.prefix}: {r.documents:,} documents, {r.tokens:,} tokens, "
        f"{r.bytes:,} bytes; {r.samples:,} samples of {r.seq_length} are read, each token {r.passes:.2f} times"
        for r in readings[:_LINES]
    ]
    if len(readings) > _LINES:
        shown.append(f"{split} data: and {len(readings) - _LINES} more data sets; tools/data_plan.py lists all")
    return shown
