"""Validation runs forwards of the training pipeline over a fixed window of another split, or over all of it."""

from collections.abc import Callable, Mapping
from typing import Any

import torch

from megatron.core.base import rank_status
from megatron.core.base.dataclass_flags import ConfigError
from megatron.core.parallel import collectives
from megatron.core.pipeline_parallel.loss_func_results import LossTotals, keep_reports
from megatron.core.pipeline_parallel.schedules import Pipeline
from megatron.training.arguments.config import TrainingConfig
from megatron.training.named_and_padded_validation_sets import EvaluatedSet


def first_sample_and_batches(number: int, num_batches: int, batch_size: int, set_size: int) -> tuple[int, int]:
    """Return (first sample, global batches) of validation `number` of a run.

    Windows follow each other and then start over. A set with fewer batches is read whole, up to its last complete
    batch. Example: 2 batches of 4 from 22 samples (5 batches): validations 0, 1, 2 start at samples 0, 8, 0.
    """
    available = set_size // batch_size
    if num_batches >= available:
        return 0, available
    windows = available // num_batches
    return number % windows * num_batches * batch_size, num_batches


def validations_until(iteration: int, config: TrainingConfig) -> int:
    """Return the number of validations after the iterations up to this one, if the run goes on after it."""
    if not config.eval_interval:
        return 0
    count = iteration // config.eval_interval
    if config.start_eval_at_iter is not None:  # those before it were left out
        count = max(0, count - (config.start_eval_at_iter - 1) // config.eval_interval)
    return count


def first_sample_and_microbatches(
    evaluated: EvaluatedSet, iteration: int, config: TrainingConfig, batch_size: int, samples_at_once: int
) -> tuple[int, int]:
    """Return (first sample, microbatches of each rank) of the validation after an iteration.

    The iteration alone decides, so a resumed run validates on the same samples.
    """
    if evaluated.is_whole:
        return 0, len(evaluated.samples) // samples_at_once

    earlier = 0
    if evaluated.split == "valid" and iteration:
        earlier = validations_until(iteration - 1, config)
    first_sample, batches = first_sample_and_batches(earlier, config.eval_iters, batch_size, len(evaluated.samples))
    return first_sample, batches * (batch_size // samples_at_once)


def evaluate(
    pipeline: Pipeline,
    make_iterators: Callable[[int], Mapping[int, object]],
    *,
    num_microbatches: int,
    first_sample: int,
    has_empty_rows: bool = False,
) -> dict[str, float | None]:
    """Return the mean of each report entry over `num_microbatches` of each rank. Every rank must call.

    An entry that counts nothing is None. The result is empty outside the last stage.

    make_iterators(first sample) -> this rank's data iterators by stage. has_empty_rows: some rows count nothing, by
    their `loss_mask`; an entry of a report that is no pair (sum, count) would count them, and raises ConfigError on
    every rank.
    """
    for chunk in pipeline.chunks.values():
        chunk.eval()

    # keep the reports if their form must be checked
    reports = []
    forward_step = None
    if has_empty_rows:
        forward_step = keep_reports(pipeline.forward_step, reports)

    # run the forwards, as many microbatches at once as in a training step
    totals = LossTotals()
    data_iterators = make_iterators(first_sample)
    at_once = pipeline.batch.num_microbatches
    samples_of_microbatch = pipeline.batch.micro_batch_size * pipeline.mesh.samples.size
    with torch.no_grad():
        for done in range(0, num_microbatches, at_once):
            rank_status.heartbeat()
            totals.add(
                pipeline.run(
                    data_iterators,
                    first_sample + done * samples_of_microbatch,
                    training=False,
                    num_microbatches=min(at_once, num_microbatches - done),
                    forward_step=forward_step,
                )
            )

    # check the reports, then share the means
    if has_empty_rows:
        with collectives.raise_together(pipeline.mesh["world"], pipeline.device):
            _check_counts(reports)
    shared = pipeline.share_totals(totals)
    return shared.report | dict.fromkeys(shared.uncounted)


def _check_counts(reports: list[Mapping[str, Any]]) -> None:
    """Raise ConfigError if an entry of the last report is no pair (sum, count)."""
    if not reports:
        return
    for name, value in reports[-1].items():
        if not isinstance(value, torch.Tensor) or value.numel() != 2:
            raise ConfigError(
                f"--full-validation: the loss function reports {name!r} as one number, a mean that also counts the "
                "padding rows of the last microbatch; it must report a pair (sum, count)"
            )
