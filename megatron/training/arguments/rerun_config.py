"""The settings of the guards against wrong numbers."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from megatron.core.base.dataclass_flags import Count, FlagConfig, WholeNumber, option


@dataclass(frozen=True)
class GuardConfig(FlagConfig):
    """Guards against wrong numbers."""

    nan_action: Literal["stop", "skip"] = option(
        "stop", "a NaN or infinite loss or gradient stops the run, or only its step's update is skipped"
    )
    check_for_spiky_loss: bool = option(
        False, "look for a microbatch whose loss is at least 10 times the largest of the first 100"
    )
    check_for_large_grads: bool = option(
        False, "look for a step whose gradient norm is at least 10 times the largest of the first 100"
    )
    spike_action: Literal["report", "skip", "stop"] = option(
        "report", "a spiky loss or a large gradient is reported, or its step's update is skipped, or it stops the run"
    )
    rerun_mode: Literal["disabled", "validate_results", "report_stats"] = option(
        "validate_results",
        "validate_results computes a step with wrong numbers again, to distinguish a failing device from wrong data, "
        "weights or code; report_stats only counts how often a microbatch computed twice differs in its bits",
    )
    rerun_interval: Count | None = option(
        None,
        "iterations between microbatches computed twice and compared to the bit; default: none, 1 with --rerun-mode report_stats",
        metavar="STEPS",
    )
    bad_step_dir: str | None = option(
        None,
        "folder for the weights, batches and settings of a step with wrong numbers; tools/replay_step.py computes it again "
        "anywhere",
        metavar="DIR",
    )
    error_injection_rate: WholeNumber = option(
        0, "inject a wrong result into one of N microbatches computed twice, to test that it is found; 0: never"
    )
    error_injection_type: Literal["correct_result", "transient_error", "persistent_error"] = option(
        "transient_error",
        "kind of result that --error-injection-rate injects: correct, wrong once, or wrong in another way each time",
    )
    iterations_to_skip: list[int] = option(
        [], "iterations whose samples are skipped without training on them", metavar="N"
    )
    check_weight_hash_across_dp_replicas_interval: Count | None = option(
        None,
        "iterations between comparisons of all copies of the weights, over data parallel ranks and every axis that holds "
        "copies; a difference stops the run and names parameter, axis and ranks",
        metavar="STEPS",
    )
    check_state_hash_interval: Count | None = option(
        None,
        "iterations between hashes of weights, masters and moments, taken after an update and checked before a save and the "
        "next update; a bit that has changed stops the run and names the tensor",
        metavar="STEPS",
    )

    @property
    def replay_every(self) -> int | None:
        """Iterations between microbatches computed twice; None: none is."""
        if self.rerun_interval:
            return self.rerun_interval
        return 1 if self.rerun_mode == "report_stats" else None

    def problems(self) -> Iterator[str]:
        wrong = [number for number in self.iterations_to_skip if number < 1]
        if wrong:
            yield f"--iterations-to-skip {' '.join(map(str, wrong))}: iterations are counted from 1, as the log does"
        if self.rerun_interval is not None and self.rerun_mode == "disabled":
            yield "--rerun-interval computes microbatches twice, and --rerun-mode disabled none; leave one of them out"
        if self.error_injection_rate and self.replay_every is None:
            yield "--error-injection-rate needs microbatches that are computed twice: give --rerun-interval N"
