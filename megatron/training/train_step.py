"""One step: forwards and backwards by the schedule, gradients made whole, one update."""

import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import nn

from megatron.core import comm
from megatron.core.deferred import WeightGradStore
from megatron.core.distributed.distributed_data_parallel import DistributedDataParallel
from megatron.core.grid import Axis
from megatron.core.mesh import Mesh
from megatron.core.optimizer.grad_scaler import DynamicGradScaler, GradScaler
from megatron.core.optimizer.optimizer import FlatOptimizer
from megatron.core.pipeline_parallel.executor import Executor, ForwardStep
from megatron.core.pipeline_parallel.loss import LossTotals
from megatron.core.pipeline_parallel.lower import add_reduce, add_transfers
from megatron.core.pipeline_parallel.schedule import Action, Op, Schedule, forward_only
from megatron.core.pipeline_parallel.simulate import make_schedule, peak_inputs
from megatron.core.pipeline_parallel.stage import loop_placement
from megatron.core.pipeline_parallel.transport import TensorSpec, Transport
from megatron.core.random import DropoutKeys
from megatron.core.transformer.transformer import ParallelTransformer
from megatron.training.watch.timers import Timers


class NotFiniteError(FloatingPointError):
    """A step gave no numbers; the message is all there is to know."""


@dataclass(frozen=True)
class BatchShape:
    """How the samples of a step are dealt out."""

    micro_batch_size: int
    num_microbatches: int  # of one rank in one step of validation, and of training where nothing else is said
    tokens_per_sample: int = 1  # when none is masked

    @property
    def nominal_tokens(self) -> int:
        """Tokens in one rank's microbatch when none is masked."""
        return self.micro_batch_size * self.tokens_per_sample

    def samples_of(self, first_sample: int, microbatch: int, samples: Axis) -> tuple[int, ...]:
        """The numbers, within the run, of the samples in the rows of one rank's microbatch. samples: `Mesh.samples`."""
        first = first_sample + (microbatch * samples.size + samples.rank) * self.micro_batch_size
        return tuple(range(first, first + self.micro_batch_size))


class Pipeline:
    """This rank's executor with the schedules of training and evaluation.

    chunks: this rank's model chunks by stage, one per virtual stage. boundary: what passes between stages, of which the ranks of
    `copies_over` hold equal copies. poison: for `Transport`.
    """

    def __init__(
        self,
        chunks: Mapping[int, DistributedDataParallel],
        mesh: Mesh,
        batch: BatchShape,
        *,
        boundary: tuple[TensorSpec, ...],
        forward_step: ForwardStep,
        keys: DropoutKeys,
        weight_grads: WeightGradStore | None = None,
        schedule_name: str = "1f1b",
        copies_over: Axis | None = None,
        device: torch.device | str = "cpu",
        poison: bool = False,
    ):
        self.chunks, self.mesh, self.batch, self.keys = chunks, mesh, batch, keys
        self.placement = loop_placement(mesh["pp"].size)
        self.transport = Transport(mesh, boundary, device, copies_over=copies_over, poison=poison)
        self.forward_step, self.weight_grads, self.device = forward_step, weight_grads, device
        self.schedule_name = schedule_name
        self.around: Callable[[Action], AbstractContextManager] | None = None  # what watches each action
        self._schedules: dict[str, tuple[int, Schedule]] = {}

    def train(
        self,
        data_iterators: Mapping[int, object],
        first_sample: int,
        loss_scale: float = 1.0,
        num_microbatches: int | None = None,
    ) -> LossTotals:
        """Forwards, backwards and the start of the gradient reduction of one step."""
        return self._run("train", data_iterators, first_sample, num_microbatches, loss_scale)

    def evaluate(
        self, data_iterators: Mapping[int, object], first_sample: int, forward_step: ForwardStep | None = None
    ) -> LossTotals:
        """The forwards of one global batch; by another `forward_step` than that of training, if one is given."""
        return self._run("evaluate", data_iterators, first_sample, forward_step=forward_step)

    def _run(
        self,
        purpose: str,
        data_iterators: Mapping[int, object],
        first_sample: int,
        num_microbatches: int | None = None,
        loss_scale: float = 1.0,
        forward_step: ForwardStep | None = None,
    ) -> LossTotals:
        pp = self.mesh["pp"]

        def begin(action: Action) -> None:
            self.keys.samples = self.batch.samples_of(first_sample, action.microbatch, self.mesh.samples)
            self.mesh.virtual_rank = action.stage // pp.size
            self.chunks[action.stage].begin_microbatch(action.microbatch, backward=action.op is not Op.F)

        executor = Executor(
            self.chunks,
            len(self.chunks) * pp.size,
            placement=self.placement,
            transport=self.transport,
            forward_step=forward_step or self.forward_step,
            data_iterators=data_iterators,
            begin=begin,
            reduce=lambda stage: self.chunks[stage].start_grad_reduce(),
            weight_grads=self.weight_grads,
            nominal_tokens=self.batch.nominal_tokens,
            around=self.around,
        )
        schedule = self.schedule(purpose, num_microbatches)
        return executor.run(schedule, pp.rank, training=purpose == "train", loss_scale=loss_scale)

    def schedule(self, purpose: str, num_microbatches: int | None = None) -> Schedule:
        """The lowered lists of all pipeline ranks, kept until a step has another number of microbatches.

        Only the last are kept: those of all sizes of a long ramp, each with the actions of every rank, would fill gigabytes.
        """
        m = num_microbatches or self.batch.num_microbatches
        made_for, schedule = self._schedules.get(purpose, (None, []))
        if made_for != m:
            p, v = self.mesh["pp"].size, len(self.chunks)
            generated = make_schedule(self.schedule_name, p, m, v) if purpose == "train" else forward_only(p, m, v)
            lowered = add_transfers(generated, self.placement)
            schedule = add_reduce(lowered) if purpose == "train" else lowered
            self._schedules[purpose] = m, schedule
            if purpose == "train":
                self._reserve(generated)
        return schedule

    def _reserve(self, schedule: Schedule) -> None:
        """Tell the layers of each chunk how many inputs of theirs will wait for a backward at once."""
        for stage, chunk in self.chunks.items():
            for layers in chunk.modules() if isinstance(chunk, nn.Module) else ():
                if isinstance(layers, ParallelTransformer):
                    layers.reserve(peak_inputs(schedule, stage))


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

    Gradients are sums over tokens until all are summed, and are then divided by the tokens of the whole step, so that no layout
    and no uneven loss mask changes what they mean. The count is that of `loss_func`, so it may be a sum of weights: a fraction, or
    negative. Of a step whose count is exactly 0 there is no mean: its gradients, zeros where every token is masked, are taken as
    they are. With a loss scale, the objective is differentiated as objective x scale / nominal tokens: a sum over tokens would leave
    float16's range, their mean does not. A gradient that overflows all the same makes every rank skip the update: its norm is
    one number for the model, and the ranks that hold copies have summed their gradients. An adapting scale reacts to that, and
    nothing is raised while it can fall. A loss that is not finite is no overflow of the scale, which lowers nothing in a forward.

    num_microbatches: of one rank in this step, where steps differ; weight_decay: where it changes. empty: called with 1 after the
    backwards and 2 after the update, to give back memory that tensors no longer need.

    Scalars that travel: token count and loss over the tokens axis and pp, with the loss report on the last stage, and the gradient norm over mp.
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
        totals = pipeline.train(data_iterators, first_sample, loss_scale, num_microbatches)
    empty(1)
    tokens, loss_sum, losses = share_totals(totals, pipeline.mesh, pipeline.device)
    with timers("all-grads-sync"):
        for chunk in chunks:
            chunk.finish_grad_reduce()
    with timers("optimizer-clip-main-grad"):
        norm, factor = optimizer.clip_factor((tokens or 1.0) * loss_scale)
    loss_is_finite, overflow = math.isfinite(loss_sum), not math.isfinite(norm)
    if check_finite:
        _check_finite(loss_sum, norm, losses, scaler)
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
    return StepResult(losses, norm, 1.0 if scaler is None else scaler.scale, skipped, loss_is_finite)


def _check_finite(loss: float, norm: float, losses: Mapping[str, float], scaler: GradScaler | None) -> None:
    """Raise NotFiniteError for what no lower loss scale mends: that scales gradients, and makes no loss NaN or infinite."""
    bad_loss = why = ""
    if not math.isfinite(loss):
        blame = "" if scaler is None else ", which no loss scale causes"
        bad_loss = f"the sum of the step's losses is {loss}{blame}, and "
    elif math.isfinite(norm) or (scaler is not None and scaler.can_fall):
        return
    elif isinstance(scaler, DynamicGradScaler):
        why = f"The step before overflowed too, and the loss scale can fall no lower (--min-loss-scale {scaler.minimum}). "
    raise NotFiniteError(
        f"{bad_loss}the gradient's norm is {norm} (losses on this rank: {losses}); nothing was updated in this step. {why}"
        "Lower --lr or look at the data; --no-check-for-nan-in-loss-and-grad goes on regardless"
    )


def share_totals(totals: LossTotals, mesh: Mesh, device: torch.device | str) -> tuple[float, float, dict[str, float]]:
    """(tokens of the whole step, sum of its losses as they were returned, on every rank; mean of each report entry, on the last stage).
    Every rank must call.

    One all-reduce over `Mesh.tokens` within the last stage carries everything; tokens and losses then go over pp.
    """
    names = sorted(totals.report)
    packed = torch.zeros(2 + 2 * len(names), dtype=torch.float64, device=device)
    packed[0], packed[1] = totals.tokens, totals.value
    for i, name in enumerate(names):
        packed[2 + 2 * i : 4 + 2 * i] = totals.report[name]
    if mesh["pp"].is_last:
        comm.all_reduce(packed, mesh.tokens)
    shared = comm.all_reduce(packed[:2].clone(), mesh["pp"])
    tokens, loss, *values = (
        torch.cat((shared, packed[2:])).cpu().tolist()
    )  # read at once: each read waits for the device
    return tokens, loss, {name: _mean(values[2 * i], values[2 * i + 1]) for i, name in enumerate(names)}


def _mean(total: float, count: float) -> float:
    return total / count if count else 0.0  # every token masked: there is nothing to report
