"""The log lines that scripts parse, in Megatron's wording, on the last rank: one per log interval, one per validation."""

import math
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from megatron.training.global_vars import print_rank_last


@dataclass(frozen=True)
class StepNumbers:
    """The numbers of one step. Learning rates and loss scale are those of the next step, as in Megatron's log line."""

    iteration: int
    consumed_samples: int
    global_batch_size: int
    lr: float
    decoupled_lr: float | None = None
    loss_scale: float = 1.0
    grad_norm: float | None = None  # None for a skipped step
    num_zeros: int | None = None  # in the gradient; None if not counted
    params_norm: float | None = None

    def curves(self, *names: str) -> dict[str, float]:
        """The fields `names` that are not None, by curve name: grad_norm becomes grad-norm."""
        values = {name.replace("_", "-"): getattr(self, name) for name in names}
        return {name: value for name, value in values.items() if value is not None}

    def rates(self) -> dict[str, float]:
        decoupled = {} if self.decoupled_lr is None else {"decoupled-learning-rate": self.decoupled_lr}
        return {"learning-rate": self.lr, **decoupled}


@dataclass(frozen=True)
class Interval:
    """The content of a log line: the steps since the previous line. `last` is the last of them."""

    last: StepNumbers
    train_iters: int
    milliseconds: float  # per step that was computed
    losses: Mapping[str, float]  # means over the steps not skipped
    skipped_iterations: int = 0
    nan_iterations: int = 0
    tflops: float | None = None  # TFLOP/s per device
    samples: float | None = None  # of a step, on average over those that were computed; None: as the last

    @property
    def samples_per_second(self) -> float:
        """Samples of all ranks per second."""
        samples = self.last.global_batch_size if self.samples is None else self.samples
        return samples / (self.milliseconds / 1000)


# Seconds between progress lines: few while a user waits to see that the run works, more after `_SETTLED` seconds.
_PROGRESS, _LATER_PROGRESS = 5.0, 60.0
_SETTLED = 600.0
_COUNTS = ("steps", "nan_steps", "skipped_steps")  # of an interval, also their names in checkpoints


class TrainingLog:
    """Averages over a log interval. Checkpoints hold its `state`, so that an interval survives a restart.

    device_flops_per_sample: FLOPs per sample divided by the number of devices; None: no throughput is logged.
    progress_in_tokens: tokens per sample, for progress lines between log lines; None: no progress lines.
    """

    def __init__(
        self,
        train_iters: int,
        log_interval: int,
        device_flops_per_sample: float | None = None,
        *,
        progress_in_tokens: int | None = None,
    ):
        self.train_iters, self.log_interval = train_iters, log_interval
        self.device_flops_per_sample, self.progress_in_tokens = device_flops_per_sample, progress_in_tokens
        self._made = self._said = time.monotonic()
        self._is_left_out = False  # of the last step
        self._begin()

    def _begin(self) -> None:
        """Begin an interval."""
        self.load_state({})
        self._began = time.perf_counter()
        self._timed_steps = self._timed_samples = 0

    def state(self) -> dict[str, Any]:
        """The sums and counts as JSON. A NaN or infinite sum is text, as JSON has no such numbers; `float` reads it back."""
        sums = {name: total if math.isfinite(total) else str(total) for name, total in self.sums.items()}
        in_all = set(self.counts.values()) <= {self.steps - self.skipped_steps}
        counts = {} if in_all else {"counts": dict(self.counts)}
        return {"sums": sums, **counts, **{name: getattr(self, name) for name in _COUNTS}}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self.sums = {name: float(total) for name, total in state.get("sums", {}).items()}
        for name in _COUNTS:
            setattr(self, name, state.get(name, 0))
        # How many steps are in each sum: those that were not skipped, unless the state says that some counted no token.
        in_all = dict.fromkeys(self.sums, self.steps - self.skipped_steps)
        self.counts: dict[str, int] = in_all | state.get("counts", {})

    def add(self, losses: Mapping[str, float], is_nan: bool = False, *, skipped: bool = False) -> None:
        """Count one step. Averages leave out the losses of skipped steps, as in Megatron, and of steps that counted
        no token."""
        if not skipped:
            for name, value in losses.items():
                self.sums[name] = self.sums.get(name, 0.0) + value
                self.counts[name] = self.counts.get(name, 0) + 1
        self.steps += 1
        self._timed_steps += 1
        self._is_left_out = False
        self.nan_steps += is_nan
        self.skipped_steps += skipped

    def leave_out(self) -> None:
        """Count one step that was not computed: it is skipped, and has no part in times and speeds."""
        self.steps += 1
        self.skipped_steps += 1
        self._is_left_out = True

    def _progress_is_due(self) -> bool:
        if self.progress_in_tokens is None:
            return False
        now = time.monotonic()
        return now - self._said >= (_PROGRESS if now - self._made < _SETTLED else _LATER_PROGRESS)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Time spent in the block (validation, checkpoints) does not count as iteration time."""
        began = time.perf_counter()
        yield
        self._began += time.perf_counter() - began

    def line_if_due(self, step: StepNumbers) -> Interval | None:
        """Print and return the interval that `step` ends, if it ends one; in between, a progress line may be due."""
        if not self._is_left_out:
            self._timed_samples += step.global_batch_size  # which may grow within an interval
        ends = step.iteration % self.log_interval == 0
        if not ends and not self._progress_is_due():
            return None
        timed = max(self._timed_steps, 1)
        milliseconds, samples = 1000 * (time.perf_counter() - self._began) / timed, self._timed_samples / timed
        losses = {name: total / self.counts[name] for name, total in self.sums.items()}
        flops = self.device_flops_per_sample
        tflops = None if flops is None else flops * samples / (milliseconds * 1e9)
        skipped, nan = self.skipped_steps, self.nan_steps
        interval = Interval(step, self.train_iters, milliseconds, losses, skipped, nan, tflops, samples)
        self._said = time.monotonic()
        if not ends:
            print_rank_last(line_between(interval, self.progress_in_tokens))
            return None
        print_rank_last(training_line(interval))
        self._begin()
        return interval


def training_line(of: Interval) -> str:
    """Megatron's log line. An interval in which every step was skipped has no losses."""
    step = of.last
    parts = [
        f" [{datetime.now():%Y-%m-%d %H:%M:%S.%f}] iteration {step.iteration:8d}/{of.train_iters:8d}",
        f"consumed samples: {step.consumed_samples:12d}",
        f"elapsed time per iteration (ms): {of.milliseconds:.1f}",
        *([] if of.tflops is None else [f"throughput per GPU (TFLOP/s/GPU): {of.tflops:.1f}"]),
        f"learning rate: {step.lr:.6E}",
        *([] if step.decoupled_lr is None else [f"decoupled learning rate: {step.decoupled_lr:.6E}"]),
        f"global batch size: {step.global_batch_size:5d}",
        *(f"{name}: {value:.6E}" for name, value in of.losses.items()),
        f"loss scale: {step.loss_scale:.1f}",
        *([] if step.grad_norm is None else [f"grad norm: {step.grad_norm:.3f}"]),
        *([] if step.num_zeros is None else [f"num zeros: {step.num_zeros:.1f}"]),
        *([] if step.params_norm is None else [f"params norm: {step.params_norm:.3f}"]),
        f"number of skipped iterations: {of.skipped_iterations:3d}",
        f"number of nan iterations: {of.nan_iterations:3d}",
    ]
    return " | ".join(parts) + " |"


def progress_line(of: Interval, tokens_per_sample: int, mfu: float | None) -> str:
    """Share done, time left and speed, for people. Time left leaves out validations and checkpoints."""
    speed = [] if of.tflops is None else [f"{of.tflops:.4g} TFLOP/s per device"]
    speed += [] if mfu is None else [f"MFU {mfu:.1%}"]
    return _progress(f"{of.last.iteration / of.train_iters:.1%} done", of, tokens_per_sample, speed)


def line_between(of: Interval, tokens_per_sample: int) -> str:
    """Step, time left, speed and mean losses so far, for people who wait for the next log line."""
    losses = [f"{name} {value:.4f}" for name, value in of.losses.items()]
    return _progress(f"step {of.last.iteration} of {of.train_iters}", of, tokens_per_sample, losses)


def _progress(done: str, of: Interval, tokens_per_sample: int, more: list[str]) -> str:
    left = timedelta(seconds=round((of.train_iters - of.last.iteration) * of.milliseconds / 1000))
    speed = f"{of.samples_per_second * tokens_per_sample:,.0f} tokens/s"
    return "   progress: " + ", ".join([done, f"{left} left", speed, *more])


def print_validation(
    split: str, name: str, iteration: int, losses: Mapping[str, float | None], *, at_end: bool
) -> None:
    """The line of a set of `split`, and a warning if it is due. name: as Megatron's lines have it, but for the test set's.
    losses: None for one that counted no token."""
    where = f"iteration {iteration}" + f" on {'validation' if split == 'valid' else split} set" * at_end
    what = name if split == "valid" else "validation"
    print_rank_last(validation_line(where, losses, what))
    if warning := validation_warning(where + what.removeprefix("validation"), losses):
        print_rank_last(warning)


def validation_line(where: str, losses: Mapping[str, float | None], what: str = "validation") -> str:
    """Megatron's validation line. what: `validation`, and the name of one of several sets."""
    parts = [f" {what} loss at {where}"]
    for name, value in losses.items():
        parts.append(f"no token counts for {name}" if value is None else f"{name} value: {value:.6E}")
        if value is not None and has_perplexity(name):
            parts.append(f"{name} PPL: {perplexity(value):.6E}")
    return " | ".join(parts) + " | "


def validation_warning(where: str, losses: Mapping[str, float | None]) -> str | None:
    """A warning if a validation loss is NaN or infinite, or counted no token; neither stops the run."""
    bad = [f"{name} is {value}" for name, value in losses.items() if value is not None and not math.isfinite(value)]
    if bad:
        return (
            f"WARNING: validation at {where}: {', '.join(bad)}. The run continues, as only training losses stop it; check the "
            "validation data and the weights"
        )
    empty = [name for name, value in losses.items() if value is None]
    if not empty:
        return None
    return (
        f"WARNING: validation at {where}: no token counts for {', '.join(empty)}, so there is no such number. The loss masks "
        "leave out every token that was read: check the validation data, and --eval-iters"
    )


def has_perplexity(name: str) -> bool:
    """Whether the validation number `name` is a cross entropy; an accuracy, or what training lowers, has no perplexity."""
    return not name.endswith(("accuracy", "objective"))


def perplexity(loss: float) -> float:
    """exp(loss), capped at e^20; NaN or infinite for such a loss."""
    return math.exp(min(20.0, loss)) if math.isfinite(loss) else math.exp(loss)
