"""The names of signals are read for --exit-signal. Pure."""

import argparse
import signal


def read_signal(text: str) -> str:
    """Return the name of a signal that can be handled: SIGUSR1 for "SIGUSR1", "usr1" and "10"."""
    number = None
    try:
        if text.isdigit():
            number = signal.Signals(int(text))
        else:
            number = signal.Signals["SIG" + text.upper().removeprefix("SIG")]
    except (KeyError, ValueError):  # no signal of this system
        pass
    if number is None or number in (signal.SIGKILL, signal.SIGSTOP, signal.SIGINT, signal.SIGSEGV):
        allowed = "SIGTERM, SIGUSR1, SIGUSR2, SIGHUP or another that a process can handle; SIGINT ends a run at once"
        raise argparse.ArgumentTypeError(f"{text}: it must be {allowed}")
    return number.name
