"""Requests to stop before the last step: a signal, duration, iteration. All ranks stop after the same step.

--exit-signal-handler    SIGTERM (or --exit-signal), SIGHUP, of a lost terminal, and SIGUSR1, a scheduler's warning, are
                         requests from the moment on in which the settings are known: a run that is asked while it
                         starts ends before its first step
without it               SIGUSR1 is said and the run goes on; SIGTERM and SIGHUP end the process, as everywhere
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

from megatron.core.base import output_streams
from megatron.core.parallel import collectives
from megatron.core.parallel.grid import Axis
from megatron.training.arguments.config import TrainingConfig

WARNING = signal.SIGUSR1  # of SLURM's --signal and other schedulers, minutes before they end the job


class Exits:
    """The exit flags, checked after each step. Ranks agree, since clocks differ and a launcher may signal only some ranks.

    began: `time.monotonic()` at the start of the run, for --exit-duration-in-mins.
    """

    def __init__(self, config: TrainingConfig, world: Axis, device: torch.device | str, began: float):
        self.config, self.world = config, world
        self.device, self.began = device, began
        self.signalled = 0  # the number of the signal that asked to stop

    @contextmanager
    def listening(self) -> Iterator[None]:
        """In the block this object hears the requests, also those that came during the start. Call in the main thread."""
        global _note
        if not self.config.exit_signal_handler:
            yield
            return
        before, _note = _note, self._note
        for number in _heard:
            self._note(number, None)
        try:
            yield
        finally:
            _note = before

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.signalled = number

    def asked(self) -> str | None:
        """Why a signal ends the run now, or None. Every rank must call; one all-reduce, if the signal handler is set."""
        return self._agreed(minutes=None) if self.config.exit_signal_handler else None

    def reason(self, iteration: int, *, last: bool) -> str | None:
        """Why all ranks stop after this step, or None. --exit-interval does not count at the last step.

        Every rank must call. One all-reduce of two numbers, if a duration or the signal handler is set.
        """
        config = self.config
        may_stop = config.exit_signal_handler or config.exit_duration_in_mins is not None
        if may_stop and (reason := self._agreed((time.monotonic() - self.began) / 60)):
            return reason
        if config.exit_interval and not last and iteration % config.exit_interval == 0:
            return "as --exit-interval asks"
        return None

    def _agreed(self, minutes: float | None) -> str | None:
        most = self.config.exit_duration_in_mins
        late = None not in (minutes, most) and minutes > most
        mine = torch.tensor([self.signalled, late], dtype=torch.int64, device=self.device)
        number, late = collectives.all_reduce(mine, self.world, "max").tolist()
        if number:
            return f"after {signal.Signals(number).name}"
        return f"after {minutes:.1f} minutes, as --exit-duration-in-mins asks" if late else None


# ---------------------------------------------------------------- signals of this process

_heard: list[int] = []  # signals that came before anybody listened
_before: dict[int, Any] = {}  # signal -> the handler that `listen_for_requests` has replaced


def _remember(number: int, frame: FrameType | None) -> None:
    _heard.append(number)


def _say(number: int, frame: FrameType | None) -> None:
    name = signal.Signals(number).name
    text = f"{name}: this job's time may be nearly up. The run goes on; --exit-signal-handler would save and stop now\n"
    output_streams.write_now(text)


_note: Callable[[int, FrameType | None], None] = _remember


def listen_for_requests(config: TrainingConfig) -> None:
    """From now on signals are requests, as the settings say. A script's own handlers of SIGUSR1 and SIGHUP stay. No-op
    outside the main thread, where no signal arrives."""
    if threading.current_thread() is not threading.main_thread():
        return
    asks = config.exit_signal_handler
    wanted = [signal.Signals[config.exit_signal]] if asks else []
    if signal.getsignal(WARNING) is signal.SIG_DFL:
        wanted.append(WARNING)
    if asks and _hears_of_a_lost_terminal(os.environ):
        wanted.append(signal.SIGHUP)
    for number in wanted:
        replaced = signal.signal(number, (lambda *heard: _note(*heard)) if asks else _say)
        _before.setdefault(number, replaced)


def _hears_of_a_lost_terminal(environment: Mapping[str, str]) -> bool:
    """Whether SIGHUP is for this process to handle.

    Under `nohup` it is not, unless torchrun sends it: torchrun handles the signal even there, passes it on to its ranks,
    which
    are in sessions of their own, and kills those that ignore it after 30 seconds.
    """
    before = signal.getsignal(signal.SIGHUP)
    return before is signal.SIG_DFL or (before is signal.SIG_IGN and "TORCHELASTIC_RUN_ID" in environment)


def stop_listening() -> None:
    """Restore the handlers of before."""
    _heard.clear()
    while _before:
        signal.signal(*_before.popitem())
