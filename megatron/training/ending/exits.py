"""Requests to stop before the last step: SIGTERM, duration, iteration. All ranks stop after the same step."""

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from megatron.core import comm
from megatron.core.grid import Axis
from megatron.training.settings.config import TrainingConfig


class Exits:
    """The exit flags, checked after each step. Ranks agree, since clocks differ and a launcher may signal only some ranks.

    began: `time.monotonic()` at the start of the run, for --exit-duration-in-mins.
    """

    def __init__(self, config: TrainingConfig, world: Axis, device: torch.device | str, began: float):
        self.config, self.world = config, world
        self.device, self.began = device, began
        self.signalled = False

    @contextmanager
    def listening(self) -> Iterator[None]:
        """In the block SIGTERM is a request to stop, if --exit-signal-handler is given. Call in the main thread."""
        if not self.config.exit_signal_handler:
            yield
            return
        before = signal.signal(signal.SIGTERM, self._note)
        try:
            yield
        finally:
            signal.signal(signal.SIGTERM, before)

    def _note(self, number: int, frame: object) -> None:
        self.signalled = True

    def reason(self, iteration: int, *, last: bool) -> str | None:
        """Why all ranks stop after this step, or None. --exit-interval does not count at the last step.

        Every rank must call. One all-reduce of two numbers, if a duration or the signal handler is set.
        """
        config = self.config
        if config.exit_signal_handler or config.exit_duration_in_mins is not None:
            minutes = (time.monotonic() - self.began) / 60
            late = config.exit_duration_in_mins is not None and minutes > config.exit_duration_in_mins
            mine = torch.tensor([self.signalled, late], dtype=torch.int64, device=self.device)
            signalled, late = comm.all_reduce(mine, self.world, "max").tolist()
            if signalled:
                return "after SIGTERM"
            if late:
                return f"after {minutes:.1f} minutes, as --exit-duration-in-mins asks"
        if config.exit_interval and not last and iteration % config.exit_interval == 0:
            return "as --exit-interval asks"
        return None
