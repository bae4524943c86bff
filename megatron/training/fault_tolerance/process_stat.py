"""The state of a process is read from /proc: whether it lives, is stopped, computes, and in which kernel call it waits.

Linux; elsewhere only whether it lives. Pure.
"""

import contextlib
import itertools
import os
import signal
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

_WORDS = {
    "R": "runs",
    "S": "sleeps",
    "D": "waits for a disk or a device",
    "T": "is stopped",
    "t": "is stopped by a debugger",
    "Z": "has ended",
    "X": "has ended",
    "I": "is idle",
    "?": "is not known",
}


@dataclass(frozen=True)
class ProcessState:
    """The state of a process at one moment."""

    state: str  # the letter of /proc/PID/stat; "X" if there is no such process, "?" without /proc
    started: int = 0  # clock ticks after boot
    bytes: int = 0  # read and written
    waits_in: str = ""  # of its main thread: the kernel's function

    @property
    def is_stopped(self) -> bool:
        return self.state in ("T", "t")

    @property
    def has_ended(self) -> bool:
        return self.state in ("X", "Z")

    def __str__(self) -> str:
        where = f" in {self.waits_in}" if self.waits_in and self.state in ("S", "D") else ""
        return f"{_WORDS.get(self.state, 'is in an unknown state')} (state {self.state}{where})"


def process_state(pid: int, started: int | None = None) -> ProcessState:
    """Return the state of process `pid`. started: if given, a later process with the same number counts as ended."""
    folder = Path(f"/proc/{pid}")
    try:
        # The name in parentheses may contain anything, parentheses too.
        fields = (folder / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ProcessState("X" if Path("/proc/self/stat").exists() else _without_proc(pid))
    state = fields[0]
    began = int(fields[19])
    if started and began != started:
        return ProcessState("X")
    return ProcessState(state, began, _bytes(folder), _text(folder / "wchan").strip("0"))


def _without_proc(pid: int) -> str:
    """Return the state of a process where there is no /proc."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return "X"
    except OSError:
        pass
    return "?"


def _text(path: Path) -> str:
    with contextlib.suppress(OSError):
        return path.read_text().strip()
    return ""


def _bytes(folder: Path) -> int:
    """Return the bytes that a process has read and written."""
    total = 0
    for name, value in itertools.pairwise(_text(folder / "io").split()):
        if name in ("rchar:", "wchar:"):
            total += int(value)
    return total


def seconds_without_core(pid: int) -> dict[int, float]:
    """Return thread -> seconds since its start in which it was ready to run and had no core; empty if unknown."""
    waits = {}
    for path in Path(f"/proc/{pid}/task").glob("*/schedstat"):
        words = _text(path).split()  # nanoseconds on a core, nanoseconds ready without one, turns
        if len(words) == 3:
            waits[int(path.parent.name)] = int(words[1]) / 1e9
    return waits


def kill(pid: int, started: int) -> bool:
    """Send SIGKILL to a process, if it is surely the process that began at `started`, of this user.

    Return whether it was sent.
    """
    if not started or pid == os.getpid() or process_state(pid, started).has_ended:
        return False
    with contextlib.suppress(OSError):
        if os.stat(f"/proc/{pid}").st_uid == os.getuid():
            os.kill(pid, signal.SIGKILL)
            return True
    return False


def wait_for_ends(processes: Iterable[tuple[int, int]], seconds: float = 2.0) -> None:
    """Wait until these processes, each (pid, started), have ended, but no longer than `seconds`."""
    deadline = time.monotonic() + seconds
    for pid, started in processes:
        while time.monotonic() < deadline and not process_state(pid, started).has_ended:
            time.sleep(0.01)
