"""Validation: forwards of the training pipeline over a fixed window of another split."""

from collections.abc import Callable, Mapping

import torch

from megatron.core import whereabouts
from megatron.core.pipeline_parallel.loss import LossTotals
from megatron.core.pipeline_parallel.pipeline import Pipeline


def window(number: int, num_batches: int, batch_size: int, set_size: int) -> tuple[int, int]:
    """(first sample, global batches) of validation `number` of a run. Windows follow each other and then start over.

    A set with fewer batches is read whole, up to its last whole batch. Example: 2 batches of 4 from 22 samples (5 batches):
    validations 0, 1, 2 start at samples 0, 8, 0.
    """
    available = set_size // batch_size
    if num_batches >= available:
        return 0, available
    return number % (available // num_batches) * num_batches * batch_size, num_batches


def evaluate(
    pipeline: Pipeline,
    make_iterators: Callable[[int], Mapping[int, object]],
    *,
    num_batches: int,
    first_sample: int,
    global_batch_size: int,
) -> dict[str, float]:
    """Mean of each report entry over `num_batches` global batches; empty outside the last stage. Every rank must call.

    make_iterators(first sample) -> this rank's data iterators by stage.
    """
    for chunk in pipeline.chunks.values():
        chunk.eval()
    data_iterators, totals = make_iterators(first_sample), LossTotals()
    with torch.no_grad():
        for batch in range(num_batches):
            whereabouts.go_on()
            totals.add(pipeline.run(data_iterators, first_sample + batch * global_batch_size, training=False))
    return pipeline.share_totals(totals).report
