"""Which samples a data-parallel rank reads, and the tensors it makes of them.

Samples are taken in order. A block of micro_batch_size * data_parallel_size samples is one micro-batch of every rank:

    stream, 2 ranks, micro-batches of 2:    | 0  1 | 2  3 | 4  5 | 6  7 | ...
                                            | rank0  rank1|rank0  rank1 |

so the samples of an iteration are the next global_batch_size of the stream, whatever the layout.
"""

from collections.abc import Iterator
from typing import Protocol

import numpy as np
import torch


class Samples(Protocol):
    """What `batches` reads: `GPTDataset`, `MockGPTDataset`, or a fork's own."""

    def __len__(self) -> int: ...

    def __getitem__(self, i: int) -> dict[str, np.ndarray]: ...


def micro_batch_ids(
    total: int, consumed_samples: int, micro_batch_size: int, data_parallel_rank: int, data_parallel_size: int
) -> Iterator[range]:
    """The positions in the stream of one rank's micro-batches: row k of one is sample ids[k] of the dataset.

    They start after `consumed_samples` and end with the last whole block; it never wraps. Example: total 9, consumed 1,
    micro-batches of 2 on rank 1 of 2: [3, 4], [7, 8].
    """
    if micro_batch_size < 1 or not 0 <= data_parallel_rank < data_parallel_size or consumed_samples < 0:
        raise ValueError(
            f"micro_batch_size ({micro_batch_size}) must be at least 1, data_parallel_rank ({data_parallel_rank}) "
            f"between 0 and data_parallel_size ({data_parallel_size}) - 1, consumed_samples ({consumed_samples}) not "
            "negative"
        )
    block = micro_batch_size * data_parallel_size
    for start in range(consumed_samples, total - block + 1, block):
        first = start + data_parallel_rank * micro_batch_size
        yield range(first, first + micro_batch_size)


def batches(
    dataset: Samples,
    consumed_samples: int,
    micro_batch_size: int,
    data_parallel_rank: int,
    data_parallel_size: int,
) -> Iterator[dict[str, torch.Tensor]]:
    """One rank's micro-batches, [micro_batch, seq] for each key of the dataset's items, until the dataset ends.

    Validation counts its own consumed_samples. No global random state is read or changed.
    """
    for ids in micro_batch_ids(
        len(dataset), consumed_samples, micro_batch_size, data_parallel_rank, data_parallel_size
    ):
        items = [dataset[i] for i in ids]
        yield {key: torch.from_numpy(np.stack([item[key] for item in items])) for key in items[0]}
