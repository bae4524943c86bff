"""One step: forwards and backwards by the schedule, gradients made whole, one update."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from megatron.core.optimizer.grad_scaler import DynamicGradScaler, GradScaler
from megatron.core.optimizer.optimizer import FlatOptimizer
from megatron.core.pipeline_parallel.pipeline import Pipeline, SharedTotals
from megatron.training.watch.timers import Timers


class NotFiniteError(FloatingPointError):
    """A step gave no numbers; the message is all there is to know."""


@dataclass(frozen=True)
class StepResult:
    """What one step is reported by. `losses` is empty on ranks outside the last stage."""

    losses: dict[str, float]
    grad_norm: float
    loss_scale: float = 1.0  # of the next step
    skipped: bool = False  # the scaled gradient is not finite, and nothing was updated
    loss_is_finite: bool = True  # of every microbatch of every rank

    @property
    def is_nan(self) -> bool:
        """Whether something else than a too large loss scale is wrong."""
        return not self.loss_is_finite or not (self.skipped or math.isfinite(self.grad_norm))


_NO_TIMERS = Timers()


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
) -> StepResult:
    """One update of the parameters. Every rank must call; all raise NotFiniteError if a loss or the gradient is not finite.

    Gradients are sums over tokens until all are summed, and are then divided by the tokens of the whole step, so that
    no layout and no uneven loss mask changes what they mean. The count is that of `loss_func`, so it may be a sum of
    weights: a fraction, or negative. Of a step whose count is exactly 0 there is no mean: its gradients, zeros where
    every token is masked, are taken as they are. With a loss scale, the objective is differentiated as objective x
    scale / nominal tokens: a sum over tokens would leave float16's range, their mean does not. A gradient that
    overflows all the same makes every rank skip the update: its norm is one number for the model, and the ranks that
    hold copies have summed their gradients. An adapting scale reacts to that, and nothing is raised while it can
    fall. A loss that is not finite is no overflow of the scale, which lowers nothing in a forward.

    num_microbatches: of one rank in this step, where steps differ; weight_decay: where it changes. empty: called with 1 after the
    backwards and 2 after the update, to give back memory that tensors no longer need.

    Scalars that travel: token count and loss over dp and pp, with the loss report on the last stage, and the gradient
    norm over mp.
    """
    chunks = list(pipeline.chunks.values())
    for chunk in chunks:
        chunk.train()
        chunk.zero_grad_buffer(num_microbatches or pipeline.batch.num_microbatches)
    scaler, batch = optimizer.scaler, pipeline.batch
    num_microbatches = num_microbatches or batch.num_microbatches
    step_tokens = batch.nominal_tokens * num_microbatches * pipeline.mesh.tokens.size
    loss_scale = 1.0 if scaler is None else scaler.scale / step_tokens
    with timers("forward-backward"):
        totals = pipeline.run(data_iterators, first_sample, num_microbatches=num_microbatches, loss_scale=loss_scale)
    empty(1)
    shared = pipeline.share_totals(totals)
    with timers("all-grads-sync"):
        for chunk in chunks:
            chunk.finish_grad_reduce()
    with timers("optimizer-clip-main-grad"):
        norm, factor = optimizer.clip_factor((shared.tokens or 1.0) * loss_scale)
    loss_is_finite, overflow = math.isfinite(shared.loss), not math.isfinite(norm)
    if check_finite:
        _check_finite(shared, norm, scaler)
    if scaler is not None and (loss_is_finite or not overflow):
        scaler.update(overflow)
    skipped = overflow and scaler is not None
    if not skipped:
        with timers("optimizer"):
            optimizer.step(lr, decoupled_lr, weight_decay=weight_decay, factor=factor)
        with timers("params-all-gather"):
            for chunk in chunks:
                chunk.gather_params()
    empty(2)
    return StepResult(shared.report, norm, 1.0 if scaler is None else scaler.scale, skipped, loss_is_finite)


def _check_finite(shared: SharedTotals, norm: float, scaler: GradScaler | None) -> None:
    """Raise NotFiniteError for what no lower loss scale mends: that scales gradients, and makes no loss NaN or infinite."""
    bad_loss = why = ""
    if not math.isfinite(shared.loss):
        blame = "" if scaler is None else ", which no loss scale causes"
        bad_loss = f"the sum of the step's losses is {shared.loss}{blame}, and "
    elif math.isfinite(norm) or (scaler is not None and scaler.can_fall):
        return
    elif isinstance(scaler, DynamicGradScaler):
        why = f"The step before overflowed too, and the loss scale can fall no lower (--min-loss-scale {scaler.minimum}). "
    raise NotFiniteError(
        f"{bad_loss}the gradient's norm is {norm} (losses on this rank: {shared.report}); nothing was updated in this step. {why}"
        "Lower --lr or look at the data; --no-check-for-nan-in-loss-and-grad goes on regardless"
    )
