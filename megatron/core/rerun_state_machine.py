"""Megatron's `get_rerun_state_machine`, as the loss functions of scripts use it.

A run here has no state machine: a step whose numbers are wrong is judged and computed again by the run's own checks
(docs/reliability.md). A script's `validate_result` raises on a wrong result, as Megatron's does without reruns.
"""

import warnings
from collections.abc import Callable
from enum import StrEnum
from functools import cache
from typing import Any

import torch

from megatron.core.base.lazy_imports import names_of_megatron
from megatron.core.parallel_state import launched_rank


class RerunMode(StrEnum):
    """Megatron's modes. Here a script's machine is always disabled; --rerun-interval sets the run's own check."""

    DISABLED = "disabled"
    VALIDATE_RESULTS = "validate_results"
    REPORT_DETERMINISM_STATS = "report_stats"


class RerunStateMachine:
    """The part of Megatron's state machine that a script calls in its loss function, and in a loop of its own."""

    def __init__(self) -> None:
        self._largest: dict[str, list[float]] = {}  # by context: samples seen, and the largest of the first ones
        self._has_run = False

    def get_mode(self) -> RerunMode:
        """Return that nothing is computed again."""
        return RerunMode.DISABLED

    def set_mode(self, mode: RerunMode) -> None:
        """Do nothing: --rerun-interval sets the run's own check."""

    def should_run_forward_backward(self, data_iterator: Any) -> bool:
        """Return True once for each step of a loop `while machine.should_run_forward_backward(data_iterator)`."""
        del data_iterator
        self._has_run = not self._has_run
        return self._has_run

    def should_checkpoint_and_exit(self) -> tuple[bool, bool, int]:
        """Return (should checkpoint, should exit, exit code): no, no, 0."""
        return False, False, 0

    def validate_result(
        self,
        result: Any,
        rejection_func: Callable[[Any], Any],
        message: str,
        comparison_func: Callable[[Any, Any], float] | None = None,
        tolerance: float = 0.0,
        fatal: bool = True,
    ) -> None:
        """Raise RuntimeError if `rejection_func(result)` is true; with fatal=False only warn.

        comparison_func, tolerance: without effect.
        """
        del comparison_func, tolerance
        if not rejection_func(result):
            return
        problem = f"rank {launched_rank()}: unexpected result {result}: {message}"
        if fatal:
            raise RuntimeError(problem)
        warnings.warn(problem, stacklevel=2)

    def is_unexpectedly_large(
        self, result: torch.Tensor, threshold: float, context: str, num_samples: int = 100, resample: bool = False
    ) -> bool:
        """Return whether `result` is at least `threshold` times the largest of the first `num_samples` of this context.

        False while these are collected, and for NaN and infinity. resample: collect anew.
        """
        value = float(result)
        if resample:
            self._largest.pop(context, None)
        seen, largest = self._largest.get(context, [0, 0.0])
        if value != value or value in (float("inf"), float("-inf")):
            return False
        if seen < num_samples:
            self._largest[context] = [seen + 1, max(largest, abs(value))]
            return False
        return abs(value) >= threshold * largest


@cache
def get_rerun_state_machine() -> RerunStateMachine:
    """Return the machine of this process, made on first use."""
    return RerunStateMachine()


__getattr__ = names_of_megatron(__name__)
