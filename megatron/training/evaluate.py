"""Validation: forwards of the training pipeline over a fixed window of another split, or over all of it."""

from collections.abc import Callable, Mapping
from typing import Any

import torch

from megatron.core.base import rank_status
from megatron.core.base.dataclass_flags import ConfigError
from megatron.core.parallel import collectives
from megatron.core.pipeline_parallel.loss_func_results import LossTotals, keep_reports
from megatron.core.pipeline_parallel.schedules import Pipeline
from megatron.training.arguments.config import TrainingConfig
from megatron.training.validation_sets import EvaluatedSet


def window(number: int, num_batches: int, batch_size: int, set_size: int) -> tuple[int, int]:
    """(first sample, global batches) of validation `number` of a run. Windows follow each other and then start over.

    A set with fewer batches is read whole, up to its last whole batch. Example: 2 batches of 4 from 22 samples (5 batches):
    validations 0, 1, 2 start at samples 0, 8, 0.
    """
    available = set_size // batch_size
    if num_batches >= available:
        return 0, available
    return number % (available // num_batches) * num_batches * batch_size, num_batches


def where_to_read(
    of: EvaluatedSet, iteration: int, length: TrainingConfig, batch_size: int, samples_at_once: int
) -> tuple[int, int]:
    """(first sample, microbatches of each rank) of the validation of a set after an iteration, from the iteration alone: a
    resumed run validates on the same samples."""
    if of.is_whole:
        return 0, len(of.samples) // samples_at_once
    earlier = 0
    if of.split == "valid" and iteration and length.eval_interval:
        earlier = (iteration - 1) // length.eval_interval
    first, batches = window(earlier, length.eval_iters, batch_size, len(of.samples))
    return first, batches * (batch_size // samples_at_once)


def evaluate(
    pipeline: Pipeline,
    make_iterators: Callable[[int], Mapping[int, object]],
    *,
    num_microbatches: int,
    first_sample: int,
    has_empty_rows: bool = False,
) -> dict[str, float | None]:
    """Mean of each report entry over `num_microbatches` of each rank, None for one that counts nothing; empty outside
    the last
    stage. Every rank must call.

    make_iterators(first sample) -> this rank's data iterators by stage. has_empty_rows: some rows count nothing, by their
    `loss_mask`; raises ConfigError on every rank for an entry that cannot tell, since it is no pair (sum, count).
    """
    for chunk in pipeline.chunks.values():
        chunk.eval()
    totals, reports = LossTotals(), []
    data_iterators = make_iterators(first_sample)
    step = keep_reports(pipeline.forward_step, reports) if has_empty_rows else None
    at_once, full = pipeline.batch.num_microbatches, pipeline.batch.micro_batch_size * pipeline.mesh.samples.size
    with torch.no_grad():
        for done in range(0, num_microbatches, at_once):
            rank_status.heartbeat()
            some = min(at_once, num_microbatches - done)
            options = {"training": False, "num_microbatches": some, "forward_step": step}
            totals.add(pipeline.run(data_iterators, first_sample + done * full, **options))
    if has_empty_rows:
        with collectives.raise_together(pipeline.mesh["world"], pipeline.device):
            _check_counts(reports)
    shared = pipeline.share_totals(totals)
    return shared.report | dict.fromkeys(shared.uncounted)


def _check_counts(reports: list[Mapping[str, Any]]) -> None:
    for name, value in reports[-1].items() if reports else ():
        if not isinstance(value, torch.Tensor) or value.numel() != 2:
            raise ConfigError(
                f"--full-validation: the loss function reports {name!r} as one number, a mean in which rows that fill up the "
                "last microbatch count; it must report a pair (sum, count)"
            )
