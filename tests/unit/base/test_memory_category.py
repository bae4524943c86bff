"""The kind of memory is said by the code that allocates it, for its thread."""

import threading

import pytest
import torch

from megatron.core.base.label_allocations_by_memory_kind import (
    ACTIVATIONS,
    current_memory_kind,
    memory_kind,
    set_memory_kind,
)
from megatron.training.memory.track_memory_by_kind import MemoryTracker


@memory_kind("gradients")
def of_gradients() -> str:
    return current_memory_kind()


def test_the_innermost_block_decides_and_ends_with_an_error_too():
    assert current_memory_kind() == ACTIVATIONS
    with memory_kind("communication"):
        assert of_gradients() == "gradients"
        with pytest.raises(ZeroDivisionError), memory_kind("other"):
            _ = 1 / 0
        assert current_memory_kind() == "communication"
    assert current_memory_kind() == ACTIVATIONS


def test_a_block_is_of_its_thread():
    seen = []
    with memory_kind("communication"):
        thread = threading.Thread(target=lambda: seen.append(current_memory_kind()))
        thread.start()
        thread.join()
    assert seen == [ACTIVATIONS]


def test_a_tracker_counts_by_the_kind_that_is_said():
    with MemoryTracker() as tracker:
        with memory_kind("communication"):
            sent = torch.ones(10)
        kept = torch.ones(100)
        assert (tracker.live["communication"], tracker.live["activations"]) == (40, 400)
        set_memory_kind("activations", [sent.view(2, 5)])
        assert (tracker.live["communication"], tracker.live["activations"]) == (0, 440)
        tracker.assign("gradients", [kept])
    set_memory_kind("communication", [kept])  # nobody counts any longer
    assert tracker.kind_of(kept) == "gradients"
