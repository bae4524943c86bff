"""A run stops before its last step on request: a signal, duration, iteration. All ranks stop after the same step.

--exit-signal-handler    SIGTERM (or --exit-signal), SIGHUP, of a lost terminal, and SIGUSR1, a scheduler's warning, are
                         requests as soon as the settings are known: a run that is requested to stop while it starts
                         ends before its first step
without it               SIGUSR1 prints a line and the run continues; SIGTERM and SIGHUP end the process, as usual
"""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch

from megatron.core.base import tolerate_broken_output
from megatron.core.parallel import collectives
from megatron.core.parallel.rank_grid import Axis
from megatron.training.arguments.config import TrainingConfig

WARNING = signal.SIGUSR1  # of SLURM's --signal and other schedulers, minutes before they end the job


class ExitConditions:
    """Check the exit flags after each step. Ranks agree, since clocks differ and a launcher may signal only some ranks.

    began: `time.monotonic()` at the start of the run, for --exit-duration-in-mins.
    """

    def __init__(self, config: TrainingConfig, world: Axis, device: torch.device | str, began: float):
        self.config = config
        self.world = world
        self.device = device
        self.began = began
        self.signalled = 0  # the number of the signal that requested to stop

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Receive the requests in the block, also those that came during the start. Call in the main thread."""
        global _note
        if not self.config.exit_signal_handler:
            yield
            return
        before = _note
        _note = self._note
        for number in _heard:
            self._note(number, None)
        try:
            yield
        finally:
            _note = before

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.signalled = number

    def signal_reason(self) -> str | None:
        """Return the signal that ends the run now, in words, or None.

        Every rank must call. One all-reduce of two numbers, if the signal handler is set.
        """
        if not self.config.exit_signal_handler:
            return None
        return self._agree(minutes=None)

    def reason(self, iteration: int, *, last: bool) -> str | None:
        """Return why all ranks stop after this step, or None. --exit-interval does not count at the last step.

        Every rank must call. One all-reduce of two numbers, if a duration or the signal handler is set.
        """
        config = self.config
        may_stop = config.exit_signal_handler or config.exit_duration_in_mins is not None
        if may_stop:
            minutes = (time.monotonic() - self.began) / 60
            reason = self._agree(minutes)
            if reason:
                return reason
        if config.exit_interval and not last and iteration % config.exit_interval == 0:
            return "as --exit-interval asks"
        return None

    def _agree(self, minutes: float | None) -> str | None:
        """Return the reason that any rank has to stop.

        minutes: since the start; None if the duration does not count.
        """
        limit = self.config.exit_duration_in_mins
        is_late = minutes is not None and limit is not None and minutes > limit
        local = torch.tensor([self.signalled, is_late], dtype=torch.int64, device=self.device)  # [2]
        number, any_late = collectives.all_reduce(local, self.world, "max").tolist()
        if number:
            return f"after {signal.Signals(number).name}"
        if any_late:
            return f"after {minutes:.1f} minutes, as --exit-duration-in-mins asks"
        return None


# ---------------------------------------------------------------- signals of this process

_heard: list[int] = []  # signals that came before `ExitConditions.listening`
_before: dict[int, Any] = {}  # signal -> the handler that `listen_for_requests` has replaced


def _remember(number: int, frame: FrameType | None) -> None:
    _heard.append(number)


def _say(number: int, frame: FrameType | None) -> None:
    name = signal.Signals(number).name
    text = f"{name}: this job's time may be nearly up. The run goes on; --exit-signal-handler would save and stop now\n"
    tolerate_broken_output.write_to_stderr_or_stdout(text)


_note: Callable[[int, FrameType | None], None] = _remember


def listen_for_requests(config: TrainingConfig) -> None:
    """Install handlers that turn signals into requests, as the settings say.

    A script's own handlers of SIGUSR1 and SIGHUP stay. Does nothing outside the main thread, where no signal arrives.
    """
    if threading.current_thread() is not threading.main_thread():
        return
    signals = []
    if config.exit_signal_handler:
        signals.append(signal.Signals[config.exit_signal])
    if signal.getsignal(WARNING) is signal.SIG_DFL:
        signals.append(WARNING)
    if config.exit_signal_handler and _receives_sighup(os.environ):
        signals.append(signal.SIGHUP)

    def note(number: int, frame: FrameType | None) -> None:
        _note(number, frame)  # looked up when the signal arrives: `ExitConditions.listening` replaces it

    handler = note if config.exit_signal_handler else _say
    for number in signals:
        replaced = signal.signal(number, handler)
        _before.setdefault(number, replaced)


def _receives_sighup(environment: Mapping[str, str]) -> bool:
    """Whether SIGHUP is for this process to handle.

    Under `nohup` it is not, unless torchrun sends it: torchrun handles the signal even there, passes it on to its
    ranks, which are in sessions of their own, and kills those that ignore it after 30 seconds.
    """
    before = signal.getsignal(signal.SIGHUP)
    return before is signal.SIG_DFL or (before is signal.SIG_IGN and "TORCHELASTIC_RUN_ID" in environment)


def stop_listening() -> None:
    """Restore the handlers that `listen_for_requests` has replaced."""
    _heard.clear()
    while _before:
        signal.signal(*_before.popitem())
