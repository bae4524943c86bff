"""`Guard`: the checks of a run, called by the loop before and after each update, and before a save."""

from typing import Any

from megatron.training.guard.check import Check
from megatron.training.guard.replicas import ReplicaCheck
from megatron.training.guard.state_hashes import StateCheck
from megatron.training.runtime import Runtime

# A check runs if its setting is given.
CHECKS: dict[str, type[Check]] = {
    "check_state_hash_interval": StateCheck,  # first: its hashes are of the state as the update left it
    "check_weight_hash_across_dp_replicas_interval": ReplicaCheck,
}


class Guard:
    """The checks that the settings ask for. `Check` says when each method is called; every rank must call."""

    def __init__(self, runtime: Runtime, *parts: Any):
        config = runtime.config.guard
        self.checks = [kind(runtime, *parts) for name, kind in CHECKS.items() if getattr(config, name)]

    def begin(self) -> None:
        for check in self.checks:
            check.begin()

    def before_update(self) -> None:
        for check in self.checks:
            check.before_update()

    def after_update(self, iteration: int) -> None:
        for check in self.checks:
            check.after_update(iteration)

    def before_save(self) -> None:
        for check in self.checks:
            check.before_save()
