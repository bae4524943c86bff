"""Which signals a run takes as requests to stop, and what ends it where nobody can be told any more."""

import os
import signal
import sys

import pytest

from megatron.training.arguments.config import TrainingConfig
from megatron.training.fault_tolerance import exit_conditions, exit_immediately_on_ctrl_c

HUP = signal.SIGHUP


@pytest.fixture
def before(monkeypatch):
    """SIGHUP as a process finds it, restored at the end."""
    kept = signal.getsignal(HUP)
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    yield lambda handler: signal.signal(HUP, handler)
    exit_conditions.stop_listening()
    signal.signal(HUP, kept)


def hears(asked: bool, name: str = "SIGTERM") -> bool:
    """Whether the run takes SIGHUP as a request."""
    found = signal.getsignal(HUP)
    exit_conditions.listen_for_requests(TrainingConfig(exit_signal_handler=asked, exit_signal=name))
    return signal.getsignal(HUP) is not found


@pytest.mark.parametrize("name", ["SIGTERM", "SIGUSR2"])
def test_a_lost_terminal_asks_a_run_that_handles_signals(name: str, before):
    before(signal.SIG_DFL)
    assert hears(True, name)
    os.kill(os.getpid(), HUP)
    assert exit_conditions._heard == [HUP]
    exit_conditions.stop_listening()
    assert signal.getsignal(HUP) is signal.SIG_DFL


def test_without_the_flag_it_stays_as_it_was(before):
    for handler in (signal.SIG_DFL, signal.SIG_IGN):
        before(handler)
        assert not hears(False)


def test_what_nohup_ignores_stays_ignored_but_for_what_torchrun_passes_on(before, monkeypatch):
    before(signal.SIG_IGN)
    assert not hears(True)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "a job")
    assert not hears(False) and hears(True)


def test_a_script_keeps_its_own_handler(before):
    before(lambda *heard: None)
    assert not hears(True)


class Lost:
    """Stands for standard error whose reader has ended."""

    def write(self, text: str) -> int:
        raise BrokenPipeError(32, "Broken pipe")

    def flush(self) -> None:
        raise BrokenPipeError(32, "Broken pipe")

    def fileno(self) -> int:
        raise BrokenPipeError(32, "Broken pipe")


def test_a_warning_of_the_scheduler_ends_no_run_that_cannot_say_it(monkeypatch):
    """It used to raise in the signal's handler, in the middle of a step."""
    monkeypatch.setattr(sys, "stderr", Lost())
    exit_conditions._say(signal.SIGUSR1, None)


def test_a_second_ctrl_c_ends_a_run_that_cannot_say_it(monkeypatch):
    """It used to end the thread that should end the process, which then hung."""
    ended = []
    monkeypatch.setattr(sys, "stderr", Lost())
    monkeypatch.setattr(os, "write", lambda handle, text: Lost().write(text))
    monkeypatch.setattr(os, "_exit", ended.append)
    exit_immediately_on_ctrl_c.ExitOnInterrupt(0)._end("once more")
    assert ended == [exit_immediately_on_ctrl_c.CODE]
