"""A warning is printed if other work on the machine keeps this process waiting for cores.

OpenMP threads that wait by spinning (libgomp's default) burn the time slices that the awaited thread needs: two threads
on two busy cores made a step 20 times as slow. Such a process looks fully busy; only the scheduler knows how long it
waits (Linux: /proc/self/task/*/schedstat).
"""

import contextlib
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

_SECONDS = 5.0  # of training between two checks
_SHARE = 0.3  # waiting time / (waiting + running time) above which the warning is printed


class ProcessorTime(NamedTuple):
    """Seconds, summed over the living threads of this process."""

    run: float
    waited: float  # ready to run, but no core was free


def processor_time(tasks: Path = Path("/proc/self/task")) -> ProcessorTime | None:
    """Return the processor time so far; None on systems without schedstat."""
    run = 0  # nanoseconds
    waited = 0
    try:
        for task in list(tasks.iterdir()):
            with contextlib.suppress(FileNotFoundError):  # the thread has just ended
                numbers = (task / "schedstat").read_text().split()
                run += int(numbers[0])
                waited += int(numbers[1])
    except (OSError, ValueError, IndexError):
        return None
    return ProcessorTime(run / 1e9, waited / 1e9) if run else None


class CpuContention:
    """Warn once if the process waits long for cores. Never warns if ranks outnumber cores: they wait for each other."""

    def __init__(
        self,
        ranks_here: int,
        cores: int,
        threads: int = 1,
        read: Callable[[], ProcessorTime | None] = processor_time,
        clock: Callable[[], float] = time.monotonic,
    ):
        """ranks_here, cores: of this machine. threads: per rank."""
        self._cores = cores
        self._threads = ranks_here * threads
        self._spins = threads > 1
        self._read = read
        self._clock = clock
        self._before = read() if ranks_here <= cores else None  # None: no more checks
        self._began = clock()

    def note_if_due(self) -> str | None:
        """Return the warning, when due; else None. Call after each step."""
        seconds = self._clock() - self._began
        if self._before is None or seconds < _SECONDS:
            return None
        now = self._read()
        if now is None:
            self._before = None
            return None
        run = now.run - self._before.run
        waited = now.waited - self._before.waited
        self._before = now
        self._began = self._clock()
        if run + waited < seconds / 2 or waited < _SHARE * (run + waited):
            return None
        self._before = None
        reason = "WARNING: other work keeps this process waiting for cores: "
        if self._threads > self._cores:
            reason = f"WARNING: more threads than cores: {self._threads} threads for {self._cores} core(s); "
        return (
            f"{reason}in the last {seconds:.0f} s the threads of this process ran for {run:.1f} s and waited {waited:.1f} s "
            "for a core. " + _advice(self._spins)
        )


def _advice(spins: bool) -> str:
    """Return the settings that would help and are not set yet, in words.

    spins: whether threads wait for one another.
    """
    settings = []
    if os.environ.get("OMP_WAIT_POLICY", "").upper() != "PASSIVE":
        settings.append("OMP_WAIT_POLICY=PASSIVE")
    if os.environ.get("OMP_NUM_THREADS") != "1":
        settings.append(f"OMP_NUM_THREADS ({os.environ.get('OMP_NUM_THREADS', 'not set')}) to the number of free cores")
    if not spins or not settings:
        return "Steps take longer; results stay the same"
    return f"Spinning threads make the wait many times worse: set {', or '.join(settings)}"
