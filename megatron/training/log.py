"""The lines that scripts parse: one per log interval, one per validation, in Megatron's wording and on the last rank."""

import math
import time
from collections.abc import Mapping
from datetime import datetime
from typing import Any

from megatron.training.runtime import print_rank_last


class TrainingLog:
    """Averages over a log interval. Its `state` goes into checkpoints, so that an interval survives a restart."""

    def __init__(self, train_iters: int, global_batch_size: int, log_interval: int):
        self.train_iters, self.global_batch_size, self.log_interval = train_iters, global_batch_size, log_interval
        self.sums: dict[str, float] = {}
        self.steps = self.nan_steps = self.skipped_steps = 0
        self._restart_clock()

    def _restart_clock(self) -> None:
        self._began, self._timed_steps = time.perf_counter(), 0

    def state(self) -> dict[str, Any]:
        """As plain JSON, which has no numbers for NaN and infinity: those sums are text, which `float` reads."""
        return {
            "sums": {name: total if math.isfinite(total) else str(total) for name, total in self.sums.items()},
            "steps": self.steps,
            "nan_steps": self.nan_steps,
            "skipped_steps": self.skipped_steps,
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        self.sums = {name: float(total) for name, total in state["sums"].items()}
        self.steps, self.nan_steps = state["steps"], state["nan_steps"]
        self.skipped_steps = state.get("skipped_steps", 0)

    def add(self, losses: Mapping[str, float], is_nan: bool = False, *, skipped: bool = False) -> None:
        """Count one step. The losses of a skipped one are left out of the averages, as Megatron does."""
        if not skipped:
            for name, value in losses.items():
                self.sums[name] = self.sums.get(name, 0.0) + value
        self.steps += 1
        self._timed_steps += 1
        self.nan_steps += is_nan
        self.skipped_steps += skipped

    def pause(self) -> "TrainingLog":
        """Leave what happens until `resume` out of the time per iteration: validation, checkpoints."""
        self._paused = time.perf_counter()
        return self

    def resume(self) -> None:
        self._began += time.perf_counter() - self._paused

    def line_if_due(
        self,
        iteration: int,
        consumed_samples: int,
        lr: float,
        grad_norm: float | None,
        *,
        decoupled_lr: float | None = None,
        loss_scale: float = 1.0,
        global_batch_size: int | None = None,
    ) -> None:
        """Print the line of this interval if it ends here. Rates and loss scale are the next step's, as Megatron's are;
        `global_batch_size` is that of this step, where steps differ."""
        if iteration % self.log_interval:
            return
        milliseconds = 1000 * (time.perf_counter() - self._began) / max(self._timed_steps, 1)
        losses = {name: total / (self.steps - self.skipped_steps) for name, total in self.sums.items()}
        print_rank_last(
            training_line(
                iteration,
                self.train_iters,
                consumed_samples,
                milliseconds,
                lr,
                global_batch_size or self.global_batch_size,
                losses,
                grad_norm,
                decoupled_lr=decoupled_lr,
                loss_scale=loss_scale,
                skipped_iterations=self.skipped_steps,
                nan_iterations=self.nan_steps,
            )
        )
        self.sums, self.steps, self.nan_steps, self.skipped_steps = {}, 0, 0, 0
        self._restart_clock()


def training_line(
    iteration: int,
    train_iters: int,
    consumed_samples: int,
    milliseconds: float,
    lr: float,
    global_batch_size: int,
    losses: Mapping[str, float],
    grad_norm: float | None,
    *,
    decoupled_lr: float | None = None,
    loss_scale: float = 1.0,
    skipped_iterations: int = 0,
    nan_iterations: int = 0,
) -> str:
    """The line that scripts parse. A skipped step has no norm, and an interval of nothing else no losses."""
    parts = [
        f" [{datetime.now():%Y-%m-%d %H:%M:%S.%f}] iteration {iteration:8d}/{train_iters:8d}",
        f"consumed samples: {consumed_samples:12d}",
        f"elapsed time per iteration (ms): {milliseconds:.1f}",
        f"learning rate: {lr:.6E}",
        *([] if decoupled_lr is None else [f"decoupled learning rate: {decoupled_lr:.6E}"]),
        f"global batch size: {global_batch_size:5d}",
        *(f"{name}: {value:.6E}" for name, value in losses.items()),
        f"loss scale: {loss_scale:.1f}",
        *([] if grad_norm is None else [f"grad norm: {grad_norm:.3f}"]),
        f"number of skipped iterations: {skipped_iterations:3d}",
        f"number of nan iterations: {nan_iterations:3d}",
    ]
    return " | ".join(parts) + " |"


def validation_line(where: str, losses: Mapping[str, float]) -> str:
    """The line of one validation; PPL is exp of the loss, capped at e^20."""
    parts = [f" validation loss at {where}"]
    for name, value in losses.items():
        parts += [f"{name} value: {value:.6E}", f"{name} PPL: {math.exp(min(20.0, value)):.6E}"]
    return " | ".join(parts) + " | "
