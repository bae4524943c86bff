"""One training step: forwards and backwards by the schedule, gradient reduction, clipping, one update."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from megatron.core.optimizer.flat_optimizer import FlatOptimizer
from megatron.core.optimizer.loss_scaler import DynamicGradScaler, GradScaler
from megatron.core.pipeline_parallel.loss_func_results import ForwardStep, LossTotals
from megatron.core.pipeline_parallel.schedules import Pipeline, SharedTotals
from megatron.core.timers import Timers
from megatron.training.batch_cache import KeptBatches


class NotFiniteError(FloatingPointError):
    """A loss or gradient norm is NaN or infinite. The message says all there is to know; no traceback is needed."""


@dataclass(frozen=True)
class StepResult:
    """The reported numbers of one step. `losses` is empty on ranks outside the last stage, and lacks those that count
    nothing."""

    losses: dict[str, float]
    grad_norm: float
    loss_scale: float = 1.0  # of the next step
    skipped: bool = False  # no parameter changed
    overflowed: bool = False  # the scaled gradient did, which a smaller loss scale repairs
    loss_is_finite: bool = True  # in every microbatch of every rank

    @property
    def is_nan(self) -> bool:
        """Whether something is NaN or infinite that a smaller loss scale would not repair."""
        return not self.loss_is_finite or not (self.overflowed or math.isfinite(self.grad_norm))


class StepFigures(NamedTuple):
    """The numbers of a computed step before its update: equal on all ranks, but for `mine`."""

    shared: SharedTotals
    norm: float
    factor: float  # of the gradients in the update
    mine: LossTotals  # of this rank, if it runs the last stage


_NO_TIMERS = Timers()


@dataclass(frozen=True)
class StepWork:
    """The forwards and backwards of one step.

    With `KeptBatches` for iterators it can be computed again, from the same weights, batches and dropout masks.
    num_microbatches:
    per rank. empty(level): see `train_step`.
    """

    pipeline: Pipeline
    optimizer: FlatOptimizer
    data_iterators: Mapping[int, object]
    first_sample: int
    num_microbatches: int
    timers: Timers = _NO_TIMERS
    empty: Callable[[int], None] = lambda level: None

    def compute(self, forward_step: ForwardStep | None = None) -> StepFigures:
        """Compute the losses and the summed gradients; nothing is updated. Every rank must call. forward_step: default: the
        pipeline's."""
        pipeline, m = self.pipeline, self.num_microbatches
        scaler = self.optimizer.scaler
        chunks = list(pipeline.chunks.values())
        for iterator in self.data_iterators.values():
            if isinstance(iterator, KeptBatches):
                iterator.rewind()
        for chunk in chunks:
            if not chunk.training:  # after a validation; the call visits every module
                chunk.train()
            chunk.zero_grad_buffer(m)
        step_tokens = pipeline.batch.nominal_tokens * m * pipeline.mesh.tokens.size
        loss_scale = 1.0 if scaler is None else scaler.scale / step_tokens
        run = partial(pipeline.run, num_microbatches=m, loss_scale=loss_scale, forward_step=forward_step)
        with self.timers("forward-backward"):
            totals = run(self.data_iterators, self.first_sample)
        self.empty(1)
        shared = pipeline.share_totals(totals)
        with self.timers("all-grads-sync"):
            for chunk in chunks:
                chunk.finish_grad_reduce()
        with self.timers("optimizer-clip-main-grad"):
            norm, factor = self.optimizer.clip_factor((shared.tokens or 1.0) * loss_scale)
        return StepFigures(shared, norm, factor, totals)


class StepGuard:
    """Looks at a step while it is taken; this one stops at numbers that are not finite. Every rank must call."""

    def before_step(self, work: StepWork) -> None:
        """Nothing of the step is computed yet."""

    def judge(self, work: StepWork, figures: StepFigures, problem: str) -> bool:
        """Whether to leave out the update; may raise. problem: the message of numbers that are not finite, or ""."""
        if problem:
            raise NotFiniteError(problem)
        return False

    def before_update(self) -> None:
        """The gradients are complete, and no parameter has changed."""


_NO_GUARD = StepGuard()


def train_step(
    pipeline: Pipeline,
    optimizer: FlatOptimizer,
    data_iterators: Mapping[int, object],
    *,
    first_sample: int,
    lr: float,
    decoupled_lr: float | None = None,
    weight_decay: float | None = None,
    num_microbatches: int | None = None,
    check_finite: bool = True,
    timers: Timers = _NO_TIMERS,
    empty: Callable[[int], None] = lambda level: None,
    guard: StepGuard = _NO_GUARD,
) -> StepResult:
    """Update the parameters once. Every rank must call; all raise NotFiniteError if a loss or the gradient is NaN or
    infinite.

    Gradients are summed over tokens and divided once, by the tokens of the whole step: neither the layout nor an uneven loss
    mask changes their meaning. `loss_func` counts the tokens; its count may be a sum of weights, fractional or negative.
    A step
    with count 0 has no mean: its gradients (zeros if every token is masked) are used undivided.

    With a loss scale, the objective is multiplied by scale / nominal tokens before the backward, because a sum over
    tokens would
    leave float16's range. If the gradient overflows all the same, every rank skips the update, since all see the same
    norm. A
    dynamic scale falls then, and no error is raised while it can fall. A NaN or infinite loss is not an overflow: the scale
    changes only the backward.

    num_microbatches: per rank in this step, default: the pipeline's. weight_decay: default: the optimizer's.
    empty(level) returns unused device memory; called with 1 after the backwards and 2 after the update. guard: decides about
    wrong numbers.

    Scalars communicated: token count and loss over dp and pp, the loss report on the last stage, the gradient norm over mp.
    """
    m, scaler = num_microbatches or pipeline.batch.num_microbatches, optimizer.scaler
    work = StepWork(pipeline, optimizer, data_iterators, first_sample, m, timers, empty)
    guard.before_step(work)
    figures = work.compute()
    shared, norm = figures.shared, figures.norm
    left_out = guard.judge(work, figures, problem_of(shared, norm, scaler) if check_finite else "")
    loss_is_finite, overflow = math.isfinite(shared.loss), not math.isfinite(norm)
    if scaler is not None and (loss_is_finite or not overflow):
        scaler.update(overflow)
    overflowed = overflow and scaler is not None
    skipped = overflowed or left_out
    if not skipped:
        guard.before_update()
        with timers("optimizer"):
            optimizer.step(lr, decoupled_lr, weight_decay=weight_decay, factor=figures.factor)
        with timers("params-all-gather"):
            for chunk in pipeline.chunks.values():
                chunk.gather_params()
    empty(2)
    scale = 1.0 if scaler is None else scaler.scale
    return StepResult(shared.report, norm, scale, skipped, overflowed, loss_is_finite)


def problem_of(shared: SharedTotals, norm: float, scaler: GradScaler | None) -> str:
    """The message of a NaN or infinite loss, or of an overflowing gradient if the loss scale cannot fall; "" otherwise."""
    bad_loss = why = ""
    if not math.isfinite(shared.loss):
        blame = "" if scaler is None else ", which no loss scale can cause"
        bad_loss = f"the sum of the step's losses is {shared.loss}{blame}, and "
    elif math.isfinite(norm) or (scaler is not None and scaler.can_fall):
        return ""
    elif isinstance(scaler, DynamicGradScaler):
        why = f"The step before overflowed too, and the loss scale is at its minimum (--min-loss-scale {scaler.minimum}). "
    return (
        f"{bad_loss}the gradient's norm is {norm} (losses on this rank: {shared.report}); nothing was updated in this step. {why}"
        "Lower --lr or check the data; --no-check-for-nan-in-loss-and-grad continues regardless"
    )
