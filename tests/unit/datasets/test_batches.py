"""Loaders: order, threads that read ahead, endless epochs. What a step reads follows from the samples consumed."""

import concurrent.futures.thread
import itertools
import random
import sys
import threading
import time

import numpy as np
import pytest
import torch

from megatron.core.base.dataclass_flags import ConfigError
from megatron.core.datasets import DataConfig
from megatron.core.datasets.data_parallel_sampler_and_loader import CyclicDataset, batches, loader
from megatron.training.evaluate_window_chosen_by_iteration import first_sample_and_batches


class Numbers:
    """Item i is i."""

    def __init__(self, count: int, broken: int | None = None):
        self.count, self.broken = count, broken
        self.threads: set[str] = set()
        self.read = 0

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, i: int) -> dict[str, np.ndarray]:
        self.threads.add(threading.current_thread().name)
        self.read += 1
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


def test_batches_that_are_open_when_the_interpreter_ends_close_without_an_error(monkeypatch):
    """As it ends a program whose trainer is open: what modules import is gone then."""
    ends = False
    monkeypatch.setattr(sys, "is_finalizing", lambda: ends)
    stream = batches(Numbers(1000), 0, 1, 0, 1, num_workers=2)
    next(stream)
    monkeypatch.setattr(concurrent.futures.thread, "queue", None)
    ends = True
    stream.close()


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


LAYOUTS = [(8, 1, 0), (2, 1, 3), (2, 2, 1), (4, 2, 0), (1, 4, 2), (2, 4, 5), (1, 8, 1)]  # micro-batch, ranks, readers


@pytest.mark.parametrize("kind", ["single", pytest.param("cyclic", marks=pytest.mark.full)])
def test_any_layout_goes_on_where_any_other_stopped(kind):
    """Steps of 8 samples: two in one layout, which reads ahead and is stopped, then two in another; all pairs of layouts."""
    expected = [n for (n,) in numbers_of(loader(kind, Numbers(36), "train", **where(0, 1)), 32)]
    for before, after in itertools.product(LAYOUTS, LAYOUTS):
        read = []
        for first, (micro_batch, size, workers) in ((0, before), (16, after)):
            places = [where(first, micro_batch, rank, size, workers) for rank in range(size)]
            streams = [loader(kind, Numbers(36), "train", **place) for place in places]
            blocks = 16 // (micro_batch * size)
            ranks = [numbers_of(stream, blocks) for stream in streams]
            read += [n for block in range(blocks) for rank in ranks for n in rank[block]]
            for stream in streams:
                stream.close()
        assert read == expected, (before, after)


def test_every_layout_validates_on_the_same_samples():
    """Batch by batch, for the first validations of a run; whoever reads, and however far ahead."""
    for number in range(4):
        first, batches_of_it = first_sample_and_batches(number, 2, 8, 60)
        for micro_batch, size, workers in LAYOUTS:
            places = [where(first, micro_batch, rank, size, workers) for rank in range(size)]
            blocks = 8 * batches_of_it // (micro_batch * size)
            ranks = [numbers_of(loader("single", Numbers(60), "valid", **place), blocks) for place in places]
            read = [n for block in range(blocks) for rank in ranks for n in rank[block]]
            assert read == list(range(first, first + 16)), (number, micro_batch, size)


@pytest.mark.parametrize("workers", [0, 1, 4])
@pytest.mark.parametrize("kind", ["single", "cyclic"])
def test_no_global_generator_is_drawn_from_or_listened_to(kind, workers):
    read = []
    for seed in (1, 2):
        random.seed(seed)
        np.random.seed(seed)
        torch.manual_seed(seed)
        before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
        read.append(numbers_of(loader(kind, Numbers(20), "train", **where(0, 2, workers=workers)), 8))
        assert (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()) == before
    assert read[0] == read[1]


def test_reading_goes_on_behind_the_step():
    """With readers, the next batch is there before it is asked for; without, nothing is read until then."""
    for workers, ahead in ((0, 2), (1, 6)):
        dataset = Numbers(100)
        stream = batches(dataset, 0, 2, 0, 1, num_workers=workers)
        next(stream)
        for _ in range(500):
            if dataset.read >= ahead:
                break
            time.sleep(0.01)
        assert dataset.read == ahead
        stream.close()


def test_validation_is_read_in_order_and_an_external_loader_is_passed_through():
    assert numbers_of(loader("cyclic", Numbers(4), "valid", **where(0, 2)), 9) == [[0, 1], [2, 3]]
    assert list(loader("external", ["theirs"], "train", **where(0, 2))) == ["theirs"]


def test_settings_that_cannot_work_are_refused():
    with pytest.raises(ValueError, match="samples"):
        CyclicDataset(Numbers(0))
    with pytest.raises(ConfigError, match=r"(?s)--num-workers.*-1"):
        DataConfig(num_workers=-1)
