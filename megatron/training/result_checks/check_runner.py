"""`Guard` runs the checks of a run; the loop calls it before and after each update, and before a save."""

from collections.abc import Iterator, Sequence
from typing import Any

from megatron.core.distributed.data_parallel import DistributedDataParallel
from megatron.core.optimizer.flat_optimizer import FlatOptimizer
from megatron.core.pipeline_parallel.schedules import Pipeline
from megatron.training.checkpointing.train_state_counters import TrainState
from megatron.training.global_vars import Runtime
from megatron.training.result_checks.base_check import Check
from megatron.training.result_checks.hash_state_between_updates import StateCheck
from megatron.training.result_checks.rerun_first_microbatch_every_interval import RerunCheck
from megatron.training.result_checks.skip_or_stop_bad_step import BadStepPolicy
from megatron.training.result_checks.weight_hash_across_replicas import ReplicaCheck
from megatron.training.rewindable_batches import RewindableBatches
from megatron.training.step import NonFiniteStepGuard, StepFigures, StepWork

# A check runs if its setting is given.
CHECKS: dict[str, type[Check]] = {
    "check_state_hash_interval": StateCheck,  # first: its hashes are of the state as the update left it
    "check_weight_hash_across_dp_replicas_interval": ReplicaCheck,
    "replay_every": RerunCheck,
}


class Guard(NonFiniteStepGuard):
    """Run the checks that the settings turn on. `Check` says when each method is called; every rank must call."""

    def __init__(
        self,
        runtime: Runtime,
        pipeline: Pipeline,
        chunks: Sequence[DistributedDataParallel],
        optimizer: FlatOptimizer,
        state: TrainState,
    ):
        self.config = runtime.config.guard
        self._counts_tokens = bool(pipeline.aux_losses)
        self.state = state
        self.checks = []
        for setting, check_class in CHECKS.items():
            if check_class.is_on(self.config, setting):
                self.checks.append(check_class(runtime, chunks, optimizer))
        self._policy = BadStepPolicy(runtime, state)
        pipeline.forward_step = self._policy.record_losses_of(pipeline.forward_step)
        self._cached_batches: list[RewindableBatches] = []

    def keeping(self, data: dict[int, Iterator | None]) -> dict[int, Any]:
        """Return the training iterators by stage, which cache a step's batches as long as it may be computed again.

        They are also cached to count the tokens of a step before it, if the model has auxiliary losses.
        """
        if self.config.rerun_mode == "disabled" and not self._counts_tokens:
            return data
        cached = {stage: None if batches is None else RewindableBatches(batches) for stage, batches in data.items()}
        self._cached_batches = [batches for batches in cached.values() if batches is not None]
        return cached

    def before_step(self, work: StepWork) -> None:
        for batches in self._cached_batches:
            batches.begin()
        for check in self.checks:
            check.before_step(self.state.iteration + 1, work)

    def judge(self, work: StepWork, figures: StepFigures, problem: str) -> bool:
        return self._policy(work, figures, problem)

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
