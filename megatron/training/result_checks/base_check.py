"""A check subclasses `Check`, and raises `WrongNumbersError`."""

from typing import Any

from torch import nn

from megatron.core.parallel.collectives import raise_together
from megatron.training.arguments.nan_spike_and_corruption_config import GuardConfig
from megatron.training.global_vars import Runtime


class WrongNumbersError(RuntimeError):
    """A check has found wrong numbers. The message says what and where; no traceback is needed."""


class Check:
    """A check overrides the methods that it needs; by default they do nothing. Every rank makes the same calls.

    begin()                         before the first step of this run
    before_step(iteration, work)    before anything of the step is computed
    before_update()                 gradients are complete, no parameter has changed
    after_update(iteration)         iteration counts from 1; not called for a step without an update
    before_save()                   before a checkpoint is saved
    """

    def __init__(self, runtime: Runtime, chunks: list[nn.Module], optimizer: Any):
        self.runtime = runtime
        self.config = runtime.config.guard
        self.mesh = runtime.mesh
        self.device = runtime.device.torch_device
        self.chunks = chunks
        self.optimizer = optimizer

    @classmethod
    def is_on(cls, config: GuardConfig, setting: str) -> bool:
        """Return whether the settings ask for this check; setting: its key in CHECKS."""
        return bool(getattr(config, setting))

    def begin(self) -> None: ...

    def before_step(self, iteration: int, work: Any) -> None: ...

    def before_update(self) -> None: ...

    def after_update(self, iteration: int) -> None: ...

    def before_save(self) -> None: ...

    def stop_if(self, problem: str) -> None:
        """Raise WrongNumbersError on the ranks with a problem, and PeerError with its text on the others.

        Every rank must call. Communication: one all-reduce of a number.
        """
        with raise_together(self.mesh["world"], self.device):
            if problem:
                raise WrongNumbersError(problem)
