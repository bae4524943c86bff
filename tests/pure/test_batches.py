"""Loaders: order, threads that read ahead, endless epochs. What a step reads follows from the samples consumed."""

import threading

import numpy as np
import pytest
import torch

from megatron.core.config import ConfigError
from megatron.core.datasets import DataConfig
from megatron.core.datasets.batches import Cyclic, batches, loader


class Numbers:
    """Item i is i."""

    def __init__(self, count: int, broken: int | None = None):
        self.count, self.broken = count, broken
        self.threads: set[str] = set()

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, i: int) -> dict[str, np.ndarray]:
        self.threads.add(threading.current_thread().name)
        if i == self.broken:
            raise ValueError("damaged")
        return {"n": np.array([i])}


def numbers_of(stream, count: int) -> list[list[int]]:
    return [batch["n"].flatten().tolist() for _, batch in zip(range(count), stream)]


@pytest.mark.parametrize("workers", [1, 2, 5])
def test_threads_change_nothing_but_who_reads(workers):
    plain, read_ahead = Numbers(101), Numbers(101)
    expected = list(batches(plain, 5, 3, 1, 2))
    got = list(batches(read_ahead, 5, 3, 1, 2, num_workers=workers))
    assert [batch["n"].tolist() for batch in got] == [batch["n"].tolist() for batch in expected]
    assert plain.threads == {threading.current_thread().name}
    assert all(name.startswith("reads ahead") for name in read_ahead.threads)


def test_an_error_comes_when_its_batch_is_asked_for():
    stream = batches(Numbers(20, broken=7), 0, 2, 0, 1, num_workers=2)
    assert numbers_of(stream, 3) == [[0, 1], [2, 3], [4, 5]]
    with pytest.raises(ValueError, match="damaged"):
        next(stream)


def test_readers_stop_when_nobody_asks_any_more():
    stream = batches(Numbers(1000), 0, 1, 0, 1, num_workers=2)
    next(stream)
    stream.close()
    for thread in threading.enumerate():
        if thread.name.startswith("reads ahead"):
            thread.join(timeout=5)
            assert not thread.is_alive()


def test_every_epoch_of_a_cyclic_loader_has_every_sample_in_an_order_of_its_own():
    stream = loader("cyclic", Numbers(10), "train", **where(consumed=0, micro_batch=5))
    read = [n for batch in numbers_of(stream, 6) for n in batch]
    epochs = [read[:10], read[10:20], read[20:]]
    for number, epoch in enumerate(epochs):
        assert sorted(epoch) == list(range(10))
        assert epoch == torch.randperm(10, generator=torch.Generator().manual_seed(number)).tolist()
    assert epochs[0] != epochs[1]


def where(consumed: int, micro_batch: int, rank: int = 0, size: int = 1, workers: int = 0) -> dict[str, int]:
    return {
        "consumed_samples": consumed,
        "micro_batch_size": micro_batch,
        "data_parallel_rank": rank,
        "data_parallel_size": size,
        "num_workers": workers,
    }


@pytest.mark.parametrize("kind", ["single", "cyclic"])
@pytest.mark.parametrize(("micro_batch", "size", "workers"), [(4, 1, 0), (2, 2, 1), (1, 4, 3), (1, 2, 2)])
def test_a_run_goes_on_at_the_next_sample_in_any_layout(kind, micro_batch, size, workers):
    whole = loader(kind, Numbers(26), "train", **where(0, 1))
    expected = [n for (n,) in numbers_of(whole, 24)]
    streams = [loader(kind, Numbers(26), "train", **where(8, micro_batch, rank, size, workers)) for rank in range(size)]
    per_step = micro_batch * size
    read = [n for parts in zip(*(numbers_of(s, 16 // per_step) for s in streams)) for part in parts for n in part]
    assert read == expected[8:]


def test_validation_is_read_in_order_and_an_external_loader_is_passed_through():
    assert numbers_of(loader("cyclic", Numbers(4), "valid", **where(0, 2)), 9) == [[0, 1], [2, 3]]
    assert list(loader("external", ["theirs"], "train", **where(0, 2))) == ["theirs"]


def test_settings_that_cannot_work_are_refused():
    with pytest.raises(ValueError, match="without samples cannot be repeated"):
        Cyclic(Numbers(0))
    with pytest.raises(ConfigError, match=r"--num-workers \(-1\) must not be negative"):
        DataConfig(num_workers=-1)
