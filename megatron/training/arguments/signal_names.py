"""Signals by name, as --exit-signal takes them. Pure."""

import argparse
import signal


def read_signal(text: str) -> str:
    """The name of a signal that can be handled: SIGUSR1 for "SIGUSR1", "usr1" and "10"."""
    try:
        found = (
            signal.Signals(int(text)) if text.isdigit() else signal.Signals["SIG" + text.upper().removeprefix("SIG")]
        )
    except (KeyError, ValueError):
        found = None
    if found is None or found in (signal.SIGKILL, signal.SIGSTOP, signal.SIGINT, signal.SIGSEGV):
        allowed = "SIGTERM, SIGUSR1, SIGUSR2, SIGHUP or another that a process can handle; SIGINT ends a run at once"
        raise argparse.ArgumentTypeError(f"{text}: it must be {allowed}")
    return found.name
