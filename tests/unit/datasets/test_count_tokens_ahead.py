"""Batches are read ahead to count their tokens, and come once and in order."""

import numpy as np
import pytest

from megatron.core.datasets.aux_loss_weight_from_next_microbatches import CountedBatches, CountsTokens
from megatron.training.rewindable_batches import RewindableBatches

BATCHES = [{"number": i, "loss_mask": np.full((2, 3), i / 2)} for i in range(6)]  # of 3 i tokens


@pytest.mark.parametrize("kind", [CountedBatches, RewindableBatches])
def test_tokens_of_the_next_batches_are_counted_before_they_are_used(kind: type):
    batches = kind(iter(BATCHES))
    assert isinstance(batches, CountsTokens)
    seen = []
    for first in (0, 2, 4):
        if kind is RewindableBatches:
            batches.begin()
        assert batches.num_tokens(2) == batches.num_tokens(2) == 3 * first + 3 * (first + 1)
        seen += [next(batches)["number"] for _ in range(2)]
    assert seen == list(range(6))
    with pytest.raises(StopIteration):
        next(batches)


def test_a_step_that_is_computed_again_has_the_tokens_of_the_first_time():
    batches = RewindableBatches(iter(BATCHES))
    batches.begin()
    first = batches.num_tokens(3), [next(batches)["number"] for _ in range(3)]
    batches.rewind()
    assert (batches.num_tokens(3), [next(batches)["number"] for _ in range(3)]) == first == (9.0, [0, 1, 2])


def test_batches_without_a_mask_have_no_count_unless_a_function_counts():
    without = [{"tokens": np.zeros((2, 3))}, (1, 2)]
    assert CountedBatches(iter(without)).num_tokens(2) is None
    assert CountedBatches(iter(without), count=lambda batch: 7.0).num_tokens(2) == 14.0
