"""The base class of a check, and the error that a check raises."""

from typing import Any

from torch import nn

from megatron.core.parallel.collectives import raise_together
from megatron.training.global_vars import Runtime


class WrongNumbersError(RuntimeError):
    """A check has found wrong numbers. The message says what and where; no traceback is needed."""


class Check:
    """What a check may do in a step, by default nothing. Every rank calls the same methods at the same places.

    begin()                     before the first step of this run
    before_step(iteration, work)    nothing of the step is computed yet
    before_update()             gradients are complete, no parameter has changed
    after_update(iteration)     of this number; not called for a step without an update
    before_save()
    """

    def __init__(self, runtime: Runtime, chunks: list[nn.Module], optimizer: Any):
        self.runtime, self.config = runtime, runtime.config.guard
        self.mesh, self.device = runtime.mesh, runtime.device.torch_device
        self.chunks, self.optimizer = chunks, optimizer

    def begin(self) -> None: ...

    def before_step(self, iteration: int, work: Any) -> None: ...

    def before_update(self) -> None: ...

    def after_update(self, iteration: int) -> None: ...

    def before_save(self) -> None: ...

    def stop_if(self, problem: str) -> None:
        """Raise WrongNumbersError on the ranks with a problem, and PeerError with its text on the others. Every rank
        must call;
        one all-reduce of a number."""
        with raise_together(self.mesh["world"], self.device):
            if problem:
                raise WrongNumbersError(problem)
