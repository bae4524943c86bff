"""Log lines that scripts parse are printed in Megatron's wording, on the last rank: one per interval and validation."""

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
        """Return the fields `names` that are not None, by curve name: grad_norm becomes grad-norm."""
        values = {name.replace("_", "-"): getattr(self, name) for name in names}
        return {name: value for name, value in values.items() if value is not None}

    def rates(self) -> dict[str, float]:
        """Return the learning rates, by curve name."""
        rates = {"learning-rate": self.lr}
        if self.decoupled_lr is not None:
            rates["decoupled-learning-rate"] = self.decoupled_lr
        return rates


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
    samples: float | None = None  # of a step, on average over those that were computed; None: as of the last
    samples_left: int | None = None  # of the run; None: as many as its steps have if the batch does not grow

    @property
    def samples_per_second(self) -> float:
        """Samples of all ranks per second."""
        samples = self.last.global_batch_size if self.samples is None else self.samples
        return samples / (self.milliseconds / 1000)

    @property
    def seconds_left(self) -> float:
        """Seconds until the run ends, at this interval's speed: in samples, as later steps may have more of them."""
        if self.samples_left is not None and self.samples_per_second > 0:
            return self.samples_left / self.samples_per_second
        return (self.train_iters - self.last.iteration) * self.milliseconds / 1000


# Seconds between progress lines: few while a user waits to see that the run works, more after `_SETTLED` seconds.
_PROGRESS = 5.0
_LATER_PROGRESS = 60.0
_SETTLED = 600.0
_COUNTS = ("steps", "nan_steps", "skipped_steps")  # of an interval, also their names in checkpoints


class TrainingLog:
    """Average losses, times and speeds over a log interval.

    Checkpoints have its `state`, so an interval survives a restart.

    device_flops_per_sample: FLOPs per sample divided by the number of devices; None: no throughput is logged.
    progress_in_tokens: tokens per sample, for progress lines between log lines; None: no progress lines.
    samples_of_run: samples consumed when the run ends, for the time left; None: every step has as many as the last.
    """

    def __init__(
        self,
        train_iters: int,
        log_interval: int,
        device_flops_per_sample: float | None = None,
        *,
        progress_in_tokens: int | None = None,
        samples_of_run: int | None = None,
    ):
        self.train_iters = train_iters
        self.log_interval = log_interval
        self.device_flops_per_sample = device_flops_per_sample
        self.progress_in_tokens = progress_in_tokens
        self.samples_of_run = samples_of_run
        self._created = time.monotonic()
        self._last_line = self._created
        self._is_left_out = False  # the last step was not computed
        self._begin()

    def _begin(self) -> None:
        """Begin an interval."""
        self.load_state({})
        self._began = time.perf_counter()
        self._timed_steps = self._timed_samples = 0

    def state(self) -> dict[str, Any]:
        """Return the sums and counts, as JSON. A NaN or infinite sum is text, which JSON has; `float` reads it back."""
        state: dict[str, Any] = {
            "sums": {name: total if math.isfinite(total) else str(total) for name, total in self.sums.items()}
        }
        # the number of steps in each sum, if that is not all steps that were not skipped
        if not set(self.counts.values()) <= {self.steps - self.skipped_steps}:
            state["counts"] = dict(self.counts)
        for name in _COUNTS:
            state[name] = getattr(self, name)
        return state

    def load_state(self, state: Mapping[str, Any]) -> None:
        self.sums = {name: float(total) for name, total in state.get("sums", {}).items()}
        for name in _COUNTS:
            setattr(self, name, state.get(name, 0))
        # How many steps are in each sum: those that were not skipped, unless the state says that some counted no token.
        not_skipped = dict.fromkeys(self.sums, self.steps - self.skipped_steps)
        self.counts: dict[str, int] = not_skipped | state.get("counts", {})

    def add(self, losses: Mapping[str, float], is_nan: bool = False, *, skipped: bool = False) -> None:
        """Count one step.

        Averages leave out skipped steps, as in Megatron, and losses of steps that counted no token.
        """
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
        """Count one step that was not computed: it counts as skipped, and not in times and speeds."""
        self.steps += 1
        self.skipped_steps += 1
        self._is_left_out = True

    def _progress_is_due(self) -> bool:
        if self.progress_in_tokens is None:
            return False
        now = time.monotonic()
        seconds_between_lines = _PROGRESS if now - self._created < _SETTLED else _LATER_PROGRESS
        return now - self._last_line >= seconds_between_lines

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leave the time of the block (validation, checkpoints) out of the iteration time."""
        began = time.perf_counter()
        yield
        self._began += time.perf_counter() - began

    def line_if_due(self, step: StepNumbers) -> Interval | None:
        """Print the line of the interval that `step` ends, and return the interval; None if it ends none.

        Between the ends a progress line may be due.
        """
        if not self._is_left_out:
            self._timed_samples += step.global_batch_size  # which may grow within an interval
        ends = step.iteration % self.log_interval == 0
        if not ends and not self._progress_is_due():
            return None
        timed_steps = max(self._timed_steps, 1)
        milliseconds = 1000 * (time.perf_counter() - self._began) / timed_steps
        samples = self._timed_samples / timed_steps
        losses = {name: total / self.counts[name] for name, total in self.sums.items()}
        flops = self.device_flops_per_sample
        tflops = None if flops is None else flops * samples / (milliseconds * 1e9)
        samples_left = None
        if self.samples_of_run is not None:
            samples_left = self.samples_of_run - step.consumed_samples
        interval = Interval(
            step,
            self.train_iters,
            milliseconds,
            losses,
            skipped_iterations=self.skipped_steps,
            nan_iterations=self.nan_steps,
            tflops=tflops,
            samples=samples,
            samples_left=samples_left,
        )
        self._last_line = time.monotonic()
        if not ends:
            print_rank_last(progress_line(interval, self.progress_in_tokens))
            return None
        print_rank_last(training_line(interval))
        self._begin()
        return interval


def training_line(interval: Interval) -> str:
    """Return Megatron's log line. An interval in which every step was skipped has no losses."""
    step = interval.last
    parts = [
        f" [{datetime.now():%Y-%m-%d %H:%M:%S.%f}] iteration {step.iteration:8d}/{interval.train_iters:8d}",
        f"consumed samples: {step.consumed_samples:12d}",
        f"elapsed time per iteration (ms): {interval.milliseconds:.1f}",
    ]
    if interval.tflops is not None:
        parts.append(f"throughput per GPU (TFLOP/s/GPU): {interval.tflops:.1f}")
    parts.append(f"learning rate: {step.lr:.6E}")
    if step.decoupled_lr is not None:
        parts.append(f"decoupled learning rate: {step.decoupled_lr:.6E}")
    parts.append(f"global batch size: {step.global_batch_size:5d}")
    for name, value in interval.losses.items():
        parts.append(f"{name}: {value:.6E}")
    parts.append(f"loss scale: {step.loss_scale:.1f}")
    if step.grad_norm is not None:
        parts.append(f"grad norm: {step.grad_norm:.3f}")
    if step.num_zeros is not None:
        parts.append(f"num zeros: {step.num_zeros:.1f}")
    if step.params_norm is not None:
        parts.append(f"params norm: {step.params_norm:.3f}")
    parts.append(f"number of skipped iterations: {interval.skipped_iterations:3d}")
    parts.append(f"number of nan iterations: {interval.nan_iterations:3d}")
    return " | ".join(parts) + " |"


def eta_and_throughput_line(interval: Interval, tokens_per_sample: int, mfu: float | None) -> str:
    """Return share done, time left and speed, for people. Time left leaves out validations and checkpoints."""
    speeds = []
    if interval.tflops is not None:
        speeds.append(f"{interval.tflops:.4g} TFLOP/s per device")
    if mfu is not None:
        speeds.append(f"MFU {mfu:.1%}")
    done = f"{interval.last.iteration / interval.train_iters:.1%} done"
    return _progress(done, interval, tokens_per_sample, speeds)


def progress_line(interval: Interval, tokens_per_sample: int) -> str:
    """Return step, time left, speed and mean losses so far, for people who wait for the next log line."""
    losses = [f"{name} {value:.4f}" for name, value in interval.losses.items()]
    done = f"step {interval.last.iteration} of {interval.train_iters}"
    return _progress(done, interval, tokens_per_sample, losses)


def _progress(done: str, interval: Interval, tokens_per_sample: int, more: list[str]) -> str:
    time_left = timedelta(seconds=round(interval.seconds_left))
    speed = f"{interval.samples_per_second * tokens_per_sample:,.0f} tokens/s"
    return "   progress: " + ", ".join([done, f"{time_left} left", speed, *more])


def print_validation(
    split: str, name: str, iteration: int, losses: Mapping[str, float | None], *, at_end: bool
) -> None:
    """Print the line of a validation or test set, and a warning if there is a reason.

    split: valid or test. name: of a validation set in Megatron's lines. losses: by name; None for a loss of no token.
    """
    where = f"iteration {iteration}"
    if at_end:
        where += f" on {'validation' if split == 'valid' else split} set"
    what = name if split == "valid" else "validation"
    print_rank_last(validation_line(where, losses, what))
    warning = validation_warning(where + what.removeprefix("validation"), losses)
    if warning:
        print_rank_last(warning)


def task_line(name: str, iteration: int, metrics: Mapping[str, float]) -> str:
    """Return the line of a task of --eval-tasks. metrics: by name."""
    values = [f"{metric}: {value:.6E}" for metric, value in metrics.items()]
    return " | ".join([f" task {name} at iteration {iteration}", *values]) + " | "


def validation_line(where: str, losses: Mapping[str, float | None], what: str = "validation") -> str:
    """Return Megatron's validation line. what: `validation`, and the name of one of several sets."""
    parts = [f" {what} loss at {where}"]
    for name, value in losses.items():
        if value is None:
            parts.append(f"no token counts for {name}")
            continue
        parts.append(f"{name} value: {value:.6E}")
        if has_perplexity(name):
            parts.append(f"{name} PPL: {perplexity(value):.6E}")
    return " | ".join(parts) + " | "


def validation_warning(where: str, losses: Mapping[str, float | None]) -> str | None:
    """Return a warning if a validation loss is NaN or infinite, or counted no token; neither stops the run."""
    not_finite = []
    for name, value in losses.items():
        if value is not None and not math.isfinite(value):
            not_finite.append(f"{name} is {value}")
    if not_finite:
        return (
            f"WARNING: validation at {where}: {', '.join(not_finite)}. The run continues, as only training losses stop it; "
            "check the validation data and the weights"
        )
    empty = [name for name, value in losses.items() if value is None]
    if not empty:
        return None
    return (
        f"WARNING: validation at {where}: no token counts for {', '.join(empty)}, so there is no such number. The loss masks "
        "leave out every token that was read: check the validation data, and --eval-iters"
    )


def has_perplexity(name: str) -> bool:
    """Whether the validation number `name` is a cross entropy.

    Accuracies and training objectives have no perplexity.
    """
    return not name.endswith(("accuracy", "objective"))


def perplexity(loss: float) -> float:
    """Return exp(loss), capped at e^20; NaN or infinity for such a loss."""
    return math.exp(min(20.0, loss)) if math.isfinite(loss) else math.exp(loss)
