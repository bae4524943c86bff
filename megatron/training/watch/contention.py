"""Whether other work on the machine keeps this process from its processors.

A thread of a parallel region that waits for the others by spinning (libgomp's habit) burns the time slices in which the one it
waits for could run: with two threads on two busy cores a step was measured to take 20 times as long. The process then seems
to compute all the time; that it is kept waiting is known to the scheduler alone (Linux: /proc/self/task/*/schedstat).
"""

import contextlib
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

_SECONDS = 5.0  # of training between two looks
_SHARE = 0.3  # of the processor time it asked for, that it has to be refused before anything is said


class ProcessorTime(NamedTuple):
    """Seconds of all threads of this process that are alive."""

    run: float
    waited: float  # able to run, and no processor was free


def processor_time(tasks: Path = Path("/proc/self/task")) -> ProcessorTime | None:
    """So far; None where the system does not say."""
    run = waited = 0
    try:
        for task in list(tasks.iterdir()):
            with contextlib.suppress(FileNotFoundError):  # a thread that has just ended
                numbers = (task / "schedstat").read_text().split()
                run, waited = run + int(numbers[0]), waited + int(numbers[1])
    except (OSError, ValueError, IndexError):
        return None
    return ProcessorTime(run / 1e9, waited / 1e9) if run else None


class Contention:
    """Looks now and then, and says once that the process is kept waiting.

    Ranks that outnumber the cores keep one another waiting, which their user knows: nothing is said of them.
    """

    def __init__(
        self,
        ranks_here: int,
        cores: int,
        threads: int = 1,
        read: Callable[[], ProcessorTime | None] = processor_time,
        clock: Callable[[], float] = time.monotonic,
    ):
        """threads: in which each rank computes."""
        self._cores, self._threads = cores, ranks_here * threads
        self._spins = threads > 1
        self._read, self._clock = read, clock
        self._before = read() if ranks_here <= cores else None
        self._began = clock()

    def note_if_due(self) -> str | None:
        """To be called after each step."""
        seconds = self._clock() - self._began
        if self._before is None or seconds < _SECONDS:
            return None
        now = self._read()
        if now is None:
            self._before = None
            return None
        run, waited = (after - before for after, before in zip(now, self._before))
        self._before, self._began = now, self._clock()
        if run + waited < seconds / 2 or waited < _SHARE * (run + waited):
            return None
        self._before = None
        reason = "WARNING: other work keeps this process from its processors: "
        if self._threads > self._cores:
            reason = f"WARNING: more threads than cores: {self._threads} threads for {self._cores} core(s); "
        return (
            f"{reason}in the last {seconds:.0f} s the threads of this process ran for {run:.1f} s and waited {waited:.1f} s "
            "for a core. " + _advice(self._spins)
        )


def _advice(spins: bool) -> str:
    """What may be changed, and is not set already. spins: whether there are threads that wait for one another."""
    settings = []
    if os.environ.get("OMP_WAIT_POLICY", "").upper() != "PASSIVE":
        settings.append("OMP_WAIT_POLICY=PASSIVE")
    if os.environ.get("OMP_NUM_THREADS") != "1":
        settings.append(f"OMP_NUM_THREADS ({os.environ.get('OMP_NUM_THREADS', 'not set')}) to the cores that are free")
    if not spins or not settings:
        return "Steps take longer, and nothing else changes"
    return f"Threads that spin while they wait make that many times worse: set {', or '.join(settings)}"
