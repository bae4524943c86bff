"""Report how much a run will read of each data set: tokens, samples, epochs, bytes. Nothing is built."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megatron.core.datasets.index_map import IndexRequest, split_tokens
from megatron.core.datasets.mmap_indexed_dataset import IndexedDataset

_MAX_LINES = 20  # data sets of one split that are listed at the start of a run


@dataclass(frozen=True)
class DataUsage:
    """The tokens, samples and bytes that a run reads of a data set in one split.

    documents, tokens, bytes: the size of the data set in that split.
    """

    prefix: str
    documents: int
    tokens: int
    bytes: int
    samples: int  # that the run reads
    seq_length: int

    @property
    def tokens_read(self) -> int:
        return self.samples * self.seq_length

    @property
    def epochs(self) -> float:
        """The average number of times that the run reads each token."""
        return self.tokens_read / self.tokens if self.tokens else math.inf


def data_usage(indexed: IndexedDataset, request: IndexRequest, samples: int) -> DataUsage:
    """Return what a run reads of a file when it takes so many samples of `request`."""
    first, past = np.searchsorted(indexed.document_indices[:-1], request.ids_range)
    tokens = split_tokens(indexed.sequence_lengths, request)
    return DataUsage(
        prefix=indexed.prefix,
        documents=int(past - first),
        tokens=tokens,
        bytes=tokens * indexed.dtype.itemsize,
        samples=samples,
        seq_length=request.seq_length,
    )


def total(usages: Sequence[DataUsage]) -> DataUsage:
    """Add all data sets up into one."""
    return DataUsage(
        prefix="all",
        documents=sum(usage.documents for usage in usages),
        tokens=sum(usage.tokens for usage in usages),
        bytes=sum(usage.bytes for usage in usages),
        samples=sum(usage.samples for usage in usages),
        seq_length=usages[0].seq_length,
    )


def usage_lines(split: str, usages: Sequence[DataUsage]) -> list[str]:
    """Return a line for each data set, at most _MAX_LINES and one more, for the start of a run."""
    all_samples = sum(usage.samples for usage in usages)
    lines = []
    for usage in usages[:_MAX_LINES]:
        percent = 100 * usage.samples / max(all_samples, 1)
        lines.append(
            f"{split} data: {percent:.2f}% {usage.prefix}: {usage.documents:,} documents, {usage.tokens:,} tokens, "
            f"{usage.bytes:,} bytes; {usage.samples:,} samples of {usage.seq_length} are read, each token "
            f"{usage.epochs:.2f} times"
        )
    if len(usages) > _MAX_LINES:
        lines.append(f"{split} data: and {len(usages) - _MAX_LINES} more data sets; tools/data_plan.py lists all")
    return lines
