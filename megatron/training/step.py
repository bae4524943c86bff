"""One training step: forwards and backwards by the schedule, gradient reduction, clipping, one update."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from megatron.core.distributed.clear_reduce_divide_gradients import GradientStep
from megatron.core.optimizer.flat_optimizer import FlatOptimizer
from megatron.core.optimizer.loss_scaler import DynamicGradScaler, GradScaler
from megatron.core.pipeline_parallel.loss_func_results import ForwardStep, LossTotals
from megatron.core.pipeline_parallel.schedules import Pipeline, SharedTotals
from megatron.core.sharding.buffer_placement_and_sync import Values, set_buffer_values
from megatron.core.timers import Timers
from megatron.training.rewindable_batches import RewindableBatches


class NotFiniteError(FloatingPointError):
    """A loss or gradient norm is NaN or infinite. The message is complete, so it is shown without a traceback."""


@dataclass(frozen=True)
class StepResult:
    """The reported numbers of one step.

    losses: means by name, on the ranks of the last stage; empty on the others. A loss that counted no token is absent.
    Auxiliary losses are among them: means over samples, and over the layers that add them.
    """

    losses: dict[str, float]
    grad_norm: float
    loss_scale: float = 1.0  # of the next step
    skipped: bool = False  # no parameter changed
    overflowed: bool = False  # the scaled gradient overflowed, which a smaller loss scale repairs
    loss_is_finite: bool = True  # in every microbatch of every rank
    aux_by_layer: Mapping[str, Mapping[int, float]] = field(default_factory=dict)  # as in `SharedTotals`
    weighed_tokens: float | None = None  # against which auxiliary losses were weighed; None: the model has none
    tokens: float = 0.0  # that `loss_func` counted

    @property
    def is_nan(self) -> bool:
        """Whether something is NaN or infinite that a smaller loss scale would not repair."""
        if not self.loss_is_finite:
            return True
        return not self.overflowed and not math.isfinite(self.grad_norm)


class StepFigures(NamedTuple):
    """The numbers of a computed step before its update: equal on all ranks, except `rank_totals`."""

    shared: SharedTotals
    norm: float  # of the whole gradient, before clipping
    factor: float  # multiplies the gradients in the update: 1 / tokens, and clipping
    rank_totals: LossTotals  # of this rank alone, if it runs the last stage
    weighed_tokens: float | None = None  # against which auxiliary losses were weighed; None: the model has none


_NO_TIMERS = Timers()


@dataclass(frozen=True)
class StepWork:
    """The forwards and backwards of one step.

    They are an object because the guard may compute them again to find the cause of wrong numbers: with `RewindableBatches`
    iterators, a second `compute` uses the same weights, buffers, batches and dropout masks.

    num_microbatches: per rank. empty(level): see `train_step`.
    """

    pipeline: Pipeline
    optimizer: FlatOptimizer
    data_iterators: Mapping[int, object]
    first_sample: int
    num_microbatches: int
    timers: Timers = _NO_TIMERS
    empty: Callable[[int], None] = lambda level: None
    buffers_before: list[Values] = field(default_factory=list)  # of each chunk, before the first computation

    def compute(self, forward_step: ForwardStep | None = None) -> StepFigures:
        """Compute the losses and the summed gradients, without an update. Every rank must call.

        forward_step: default: the pipeline's.
        """
        pipeline = self.pipeline
        scaler = self.optimizer.scaler
        chunks = list(pipeline.chunks.values())

        # rewind the data: a second computation must read the same batches
        for iterator in self.data_iterators.values():
            if isinstance(iterator, RewindableBatches):
                iterator.rewind()

        # the buffers of modules: a second computation must begin with the same values
        for values in self.buffers_before:
            set_buffer_values(values)
        if not self.buffers_before:
            self.buffers_before.extend(chunk.buffer_values() for chunk in chunks)

        # begin the gradients; with a loss scale the sum over all tokens would leave float16's range
        gradients = GradientStep(chunks)
        if scaler is not None:
            step_tokens = pipeline.batch.nominal_tokens * self.num_microbatches * pipeline.mesh.tokens.size
            gradients = GradientStep(chunks, loss_scale=scaler.scale, nominal_tokens=step_tokens)
        for chunk in chunks:
            if not chunk.training:  # only after a validation, since train() visits every module
                chunk.train()
        gradients.begin(self.num_microbatches)
        pipeline.weigh_aux_losses(gradients, self.data_iterators, self.num_microbatches)

        # run all forwards and backwards in the order of the schedule
        with self.timers("forward-backward"):
            totals = pipeline.run(
                self.data_iterators,
                self.first_sample,
                num_microbatches=self.num_microbatches,
                loss_scale=gradients.objective_scale,
                aux_weight=gradients.aux_weight,
                forward_step=forward_step,
            )
        self.empty(1)

        # sum tokens and losses over the ranks
        shared = pipeline.share_totals(totals)

        # complete the gradients: wait for their reduction, and sum those of tied embeddings
        with self.timers("all-grads-sync"):
            gradients.finish(shared.tokens)

        # compute the norm, and the factor that divides by the tokens, unscales and clips
        with self.timers("optimizer-clip-main-grad"):
            norm, factor = self.optimizer.clip_factor(gradients.divisor)
        return StepFigures(shared, norm, factor, totals, gradients.weighed_tokens)


class NonFiniteStepGuard:
    """Checks each step before its update. This base class stops at numbers that are not finite.

    Every rank must call.
    """

    def before_step(self, work: StepWork) -> None:
        """Called before anything of the step is computed."""

    def judge(self, work: StepWork, figures: StepFigures, problem: str) -> bool:
        """Return whether to skip the update; may raise.

        problem: the message about numbers that are not finite, or "".
        """
        if problem:
            raise NotFiniteError(problem)
        return False

    def before_update(self) -> None:
        """Called when the gradients are complete and no parameter has changed."""


_NO_GUARD = NonFiniteStepGuard()


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
    guard: NonFiniteStepGuard = _NO_GUARD,
) -> StepResult:
    """Update the parameters once.

    Every rank must call; all raise NotFiniteError if a loss or the gradient is NaN or infinite.

    Gradients are summed over tokens and divided once, by the tokens of the whole step. So neither the layout nor an
    uneven loss mask changes their meaning. `loss_func` counts the tokens; its count may be a sum of weights, fractional
    or negative. A step with count 0 has no mean: its gradients (zeros if every token is masked) are used undivided.

    With a loss scale, the objective is multiplied by scale / nominal tokens before the backward, because a sum over
    tokens would leave float16's range. If the gradient overflows nevertheless, every rank skips the update, since all
    have the same norm. A dynamic scale is then lowered, and no error is raised while it can be lowered. A NaN or
    infinite loss is not an overflow: the scale changes only the backward.

    num_microbatches: per rank in this step, default: the pipeline's. weight_decay: default: the optimizer's.
    empty(level) returns unused device memory; called with 1 after the backwards and with 2 after the update.
    guard: decides what happens to a step with wrong numbers.

    Auxiliary losses that layers add are weighed against the tokens of the step, which the data iterators count before
    it (`Pipeline.weigh_aux_losses`).

    Scalars communicated: token count and loss over dp and pp, the loss report on the last stage, the gradient norm over
    mp; with auxiliary losses the tokens to come over all ranks, and their sums over dp and pp.
    """
    # compute the losses, the summed gradients and their norm
    scaler = optimizer.scaler
    work = StepWork(
        pipeline,
        optimizer,
        data_iterators,
        first_sample,
        num_microbatches or pipeline.batch.num_microbatches,
        timers,
        empty,
    )
    guard.before_step(work)
    figures = work.compute()

    # ask the guard whether the update may happen; it must see the loss scale before that is changed below
    problem = ""
    if check_finite:
        problem = non_finite_problem(figures.shared, figures.norm, scaler)
    guard_skips = guard.judge(work, figures, problem)

    # adapt the loss scale, except after a NaN or infinite loss, which the scale did not cause
    loss_is_finite = math.isfinite(figures.shared.loss)
    norm_is_finite = math.isfinite(figures.norm)
    if scaler is not None and (loss_is_finite or norm_is_finite):
        scaler.update(not norm_is_finite)
    overflowed = scaler is not None and not norm_is_finite

    # update the parameters, then start gathering those that are sharded
    skipped = overflowed or guard_skips
    if not skipped:
        guard.before_update()
        with timers("optimizer"):
            optimizer.step(lr, decoupled_lr, weight_decay=weight_decay, factor=figures.factor)
        with timers("params-all-gather"):
            for chunk in pipeline.chunks.values():
                chunk.gather_params()
    empty(2)

    # report
    return StepResult(
        losses=figures.shared.report,
        grad_norm=figures.norm,
        loss_scale=1.0 if scaler is None else scaler.scale,
        skipped=skipped,
        overflowed=overflowed,
        loss_is_finite=loss_is_finite,
        aux_by_layer=figures.shared.aux_by_layer,
        weighed_tokens=figures.weighed_tokens,
        tokens=figures.shared.tokens,
    )


def non_finite_problem(shared: SharedTotals, norm: float, scaler: GradScaler | None) -> str:
    """Return the message about a NaN or infinite loss, or about a gradient overflow that the loss scale cannot repair.

    "" if there is neither.
    """
    loss_text = ""
    scale_text = ""
    if not math.isfinite(shared.loss):
        no_scale = "" if scaler is None else ", which no loss scale can cause"
        loss_text = f"the sum of the step's losses is {shared.loss}{no_scale}, and "
    elif math.isfinite(norm) or (scaler is not None and scaler.can_fall):
        return ""
    elif isinstance(scaler, DynamicGradScaler):
        scale_text = f"The step before overflowed too, and the loss scale is at its minimum (--min-loss-scale {scaler.minimum}). "
    return (
        f"{loss_text}the gradient's norm is {norm} (losses on this rank: {shared.report}); no parameter was updated in "
        f"this step. {scale_text}"
        "Lower --lr or check the data; --no-check-for-nan-in-loss-and-grad continues regardless"
    )
