"""Flags of the guards against wrong numbers."""

from dataclasses import dataclass

from megatron.core.config import Count, FlagConfig, knob


@dataclass(frozen=True)
class GuardConfig(FlagConfig):
    """Guards against wrong numbers."""

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
