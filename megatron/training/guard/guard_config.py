"""Flags of the guards against wrong numbers."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from megatron.core.config import Count, FlagConfig, knob


@dataclass(frozen=True)
class GuardConfig(FlagConfig):
    """Guards against wrong numbers."""

    nan_action: Literal["stop", "skip"] = knob(
        "stop", "a NaN or infinite loss or gradient stops the run, or only its step's update is skipped"
    )
    check_for_spiky_loss: bool = knob(
        False, "look for a microbatch whose loss is at least 10 times the largest of the first 100"
    )
    check_for_large_grads: bool = knob(
        False, "look for a step whose gradient norm is at least 10 times the largest of the first 100"
    )
    spike_action: Literal["report", "skip", "stop"] = knob(
        "report", "a spiky loss or a large gradient is reported, or its step's update is skipped, or it stops the run"
    )
    rerun_mode: Literal["disabled", "validate_results"] = knob(
        "validate_results",
        "compute a step with wrong numbers again, to tell a device that fails from data, weights and program",
    )
    iterations_to_skip: list[int] = knob(
        [], "iterations whose samples are passed over without being trained on", metavar="N"
    )
    check_weight_hash_across_dp_replicas_interval: Count | None = knob(
        None,
        "iterations between comparisons of all copies of the weights, over data parallel ranks and every axis that holds "
        "copies; a difference stops the run and names parameter, axis and ranks",
        metavar="STEPS",
    )
    check_state_hash_interval: Count | None = knob(
        None,
        "iterations between hashes of weights, masters and moments, taken after an update and checked before a save and the "
        "next update; a bit that has changed stops the run and names the tensor",
        metavar="STEPS",
    )

    def problems(self) -> Iterator[str]:
        if wrong := [number for number in self.iterations_to_skip if number < 1]:
            yield f"--iterations-to-skip {' '.join(map(str, wrong))}: iterations are counted from 1, as the log does"
