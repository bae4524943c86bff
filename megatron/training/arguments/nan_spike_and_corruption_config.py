"""The settings of the guards against wrong numbers."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from megatron.core.base.dataclass_flags import Count, FlagConfig, WholeNumber, option


@dataclass(frozen=True)
class GuardConfig(FlagConfig):
    """Guards against wrong numbers."""

    nan_action: Literal["stop", "skip"] = option(
        "stop", "at a NaN or infinite loss or gradient: stop the run, or skip the update of that step"
    )
    check_for_spiky_loss: bool = option(
        False, "detect a loss spike: a microbatch whose loss is at least 10 times the largest of the first 100"
    )
    check_for_large_grads: bool = option(
        False, "detect a large gradient: a step whose gradient norm is at least 10 times the largest of the first 100"
    )
    spike_action: Literal["report", "skip", "stop"] = option(
        "report", "at a spiky loss or a large gradient: report it, skip the update of that step, or stop the run"
    )
    rerun_mode: Literal["disabled", "validate_results", "report_stats"] = option(
        "validate_results",
        "validate_results: recompute a step with a NaN, an infinity or a spike, to tell a failing device from wrong "
        "data, weights or code; report_stats: only count how often the bits of a microbatch that is computed twice "
        "differ; disabled: neither",
    )
    rerun_interval: Count | None = option(
        None,
        "iterations between checks that compute a microbatch twice and compare all bits; default: no checks, or 1 "
        "with --rerun-mode report_stats",
        metavar="STEPS",
    )
    bad_step_dir: str | None = option(
        None,
        "when a step has a NaN, an infinity or a spike, save its weights, batches and settings in this folder; "
        "tools/replay_step.py recomputes the step on any machine",
        metavar="DIR",
    )
    error_injection_rate: WholeNumber = option(
        0,
        "test --rerun-interval: inject a wrong result into one of every N microbatches that are computed "
        "twice; 0: never",
    )
    error_injection_type: Literal["correct_result", "transient_error", "persistent_error"] = option(
        "transient_error",
        "what --error-injection-rate injects: correct_result: no error; transient_error: an error in the first "
        "computation only; persistent_error: an error in every computation, each time a different one",
    )
    iterations_to_skip: list[int] = option(
        [], "iterations to skip: their samples count as consumed, but are not trained on", metavar="N"
    )
    check_weight_hash_across_dp_replicas_interval: Count | None = option(
        None,
        "iterations between comparisons of all replicas of the weights, over data-parallel ranks and every other "
        "axis that replicates them; a difference stops the run with the names of parameter, axis and ranks",
        metavar="STEPS",
    )
    test_mode: bool = option(
        False, "compare all replicas of the weights after each iteration, as with that interval of 1"
    )
    check_state_hash_interval: Count | None = option(
        None,
        "iterations between hashes of weights, fp32 masters and moments; a hash is taken after an update and checked "
        "before the next update and before a save; a changed bit stops the run with the tensor's name",
        metavar="STEPS",
    )

    @property
    def replay_every(self) -> int | None:
        """Iterations between microbatches computed twice; None: none is."""
        if self.rerun_interval:
            return self.rerun_interval
        return 1 if self.rerun_mode == "report_stats" else None

    @property
    def compare_replicas_every(self) -> int | None:
        """Iterations between comparisons of the replicas of the weights; None: they are not compared."""
        if self.check_weight_hash_across_dp_replicas_interval or not self.test_mode:
            return self.check_weight_hash_across_dp_replicas_interval
        return 1

    def problems(self) -> Iterator[str]:
        wrong = [number for number in self.iterations_to_skip if number < 1]
        if wrong:
            yield f"--iterations-to-skip {' '.join(map(str, wrong))}: iterations are counted from 1, as in the log"
        if self.rerun_interval is not None and self.rerun_mode == "disabled":
            yield (
                "--rerun-interval computes microbatches twice, but --rerun-mode disabled forbids that; leave one "
                "of them out"
            )
