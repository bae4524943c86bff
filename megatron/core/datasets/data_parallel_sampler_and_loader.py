"""Decide which samples a data-parallel rank reads, and make tensors of them.

Samples are taken in order. A block of micro_batch_size * data_parallel_size samples is one microbatch of every rank:

    stream, 2 ranks, microbatches of 2:     | 0  1 | 2  3 | 4  5 | 6  7 | ...
                                            | rank0  rank1|rank0  rank1 |

So the samples of an iteration are the next global_batch_size of the stream, in every layout and with any number of
threads.
"""

import itertools
import sys
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import Protocol

import numpy as np
import torch


class Samples(Protocol):
    """The data set that `batches` reads: `GPTDataset`, `MockGPTDataset`, or a fork's own.

    Item i is key -> array; the arrays of a key have one shape in every item, such as tokens, int64 [s].
    """

    def __len__(self) -> int: ...

    def __getitem__(self, i: int) -> dict[str, np.ndarray]: ...


def micro_batch_ids(
    total: int, consumed_samples: int, micro_batch_size: int, data_parallel_rank: int, data_parallel_size: int
) -> Iterator[range]:
    """Yield the sample numbers of one rank's microbatches: row k of a microbatch is sample ids[k] of the data set.

    They start after `consumed_samples` and end with the last full block; the stream does not start over. Example: total
    9, consumed 1, microbatches of 2 on rank 1 of 2: [3, 4], [7, 8].
    """
    if micro_batch_size < 1 or not 0 <= data_parallel_rank < data_parallel_size or consumed_samples < 0:
        raise ValueError(
            f"micro_batch_size ({micro_batch_size}) must be at least 1, data_parallel_rank ({data_parallel_rank}) "
            f"between 0 and data_parallel_size ({data_parallel_size}) - 1, and consumed_samples ({consumed_samples}) "
            "not negative"
        )
    block = micro_batch_size * data_parallel_size
    for start in range(consumed_samples, total - block + 1, block):
        first = start + data_parallel_rank * micro_batch_size
        yield range(first, first + micro_batch_size)


class CyclicDataset:
    """An endless data set: each epoch is shuffled with its number as seed.

    The epochs are laid end to end, so the next sample depends only on the number of consumed samples, in any layout.
    """

    def __init__(self, dataset: Samples):
        if not len(dataset):
            raise ValueError("a data set without samples cannot be repeated; use more data")
        self.dataset = dataset
        self._order = lru_cache(maxsize=2)(self._draw_order)  # two, since a batch may cross the border of two epochs

    def __len__(self) -> int:
        return sys.maxsize

    def __getitem__(self, i: int) -> dict[str, np.ndarray]:
        """Return item i of the stream: an item of the data set, with its keys and shapes."""
        epoch, number = divmod(i, len(self.dataset))
        return self.dataset[int(self._order(epoch)[number])]

    def _draw_order(self, epoch: int) -> torch.Tensor:
        return torch.randperm(len(self.dataset), generator=torch.Generator().manual_seed(epoch))  # [samples]


def batches(
    dataset: Samples,
    consumed_samples: int,
    micro_batch_size: int,
    data_parallel_rank: int,
    data_parallel_size: int,
    *,
    num_workers: int = 0,
) -> Iterator[dict[str, torch.Tensor]]:
    """Yield one rank's microbatches until the data set ends: [b, s] for each key of the data set's items [s].

    A key whose arrays have another shape [..] gives [b, ..]. Dtypes are those of the arrays. Validation counts its own
    consumed_samples. num_workers: threads that prefetch, two microbatches each; 0 reads on demand. No global random
    state is read or changed.
    """

    def read(ids: range) -> dict[str, torch.Tensor]:
        items = [dataset[i] for i in ids]
        return {key: torch.from_numpy(np.stack([item[key] for item in items])) for key in items[0]}  # [b, s] each

    ids_of_batches = micro_batch_ids(
        len(dataset), consumed_samples, micro_batch_size, data_parallel_rank, data_parallel_size
    )
    if num_workers == 0:
        for ids in ids_of_batches:
            yield read(ids)
        return

    # A queue in the order of the stream: the oldest batch is awaited while younger ones are read.
    pool = ThreadPoolExecutor(num_workers, thread_name_prefix="reads ahead")
    is_finalizing = sys.is_finalizing  # at the interpreter's end the module's own names are gone
    try:
        queue = deque(pool.submit(read, ids) for ids in itertools.islice(ids_of_batches, 2 * num_workers))
        while queue:
            batch = queue.popleft().result()
            next_ids = next(ids_of_batches, None)
            if next_ids is not None:
                queue.append(pool.submit(read, next_ids))
            yield batch
    finally:
        # a program may end while its batches are still open: then the threads have ended already, and `shutdown` would fail
        if not is_finalizing():
            pool.shutdown(wait=False, cancel_futures=True)


def loader(kind: str, dataset: Samples | Iterable, split: str, **reading: int) -> Iterator[dict[str, torch.Tensor]]:
    """Return the batches of a split by `--dataloader-type` KIND.

    single reads a data set once; cyclic repeats the training set; external is the user's own, which the script's
    provider gave in place of a data set: an iterable of this rank's microbatches. reading: the other arguments of
    `batches`. A batch is as of `batches`: key -> [b, s].
    """
    if kind == "external":
        return iter(dataset)
    if kind == "cyclic" and split == "train":
        dataset = CyclicDataset(dataset)
    return batches(dataset, **reading)
