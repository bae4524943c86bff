"""A rank that hangs is found and named, with who waits for it in which call, and the job is ended.

Each rank has a watcher.

    main thread      writes its status: phase, iteration, last call on each axis (`core/base/rank_status.py`)
    watcher thread   sees that its main thread makes no progress for --hang-timeout times the median step. The first one
                     to see it looks at all ranks of the machine from outside: statuses, processes, and then stacks
    diagnosis        `find_hung_rank.py` says who hangs, or that no rank does (a slow save, a rank that went on since)
    end              every rank that answers prints its line and exits with `HUNG`; ranks that hang are killed

Nothing that is looked at needs the watched rank to answer: statuses are files in memory, a process's state comes from
the kernel, and a stack is written by a signal handler that needs no interpreter lock (`faulthandler`). So it works
whichever rank is stopped, the first rank too.
"""

import contextlib
import faulthandler
import json
import os
import signal
import socket
import statistics
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from megatron.core.base import rank_status, tolerate_broken_output
from megatron.core.base.exit_callbacks_and_hard_exit import hard_exit
from megatron.core.base.rank_status import RankStatus, read_status
from megatron.core.base.user_error_and_torchrun_error_file import write_error_file
from megatron.training.arguments.hang_config import HangConfig
from megatron.training.fault_tolerance import hang_watch_folder
from megatron.training.fault_tolerance.find_hung_rank import (
    Diagnosis,
    RankSnapshot,
    diagnose,
    hang_report,
    has_known_duration,
)
from megatron.training.fault_tolerance.process_stat import kill, process_state, seconds_without_core, wait_for_ends

HUNG = 4  # exit code of every rank that answers
# A process does something if it uses more than this share of a core, or reads and writes more bytes a second.
_ACTIVE = 0.05
_ACTIVE_BYTES = 1 << 16
_SECONDS_BETWEEN_REPORTS = 60.0
_STACK_SIGNAL = signal.SIGUSR2  # requests the stacks of a process
_SHARE_OF_TIMEOUT = 0.9  # of --distributed-timeout-minutes, after which the back end ends the job by itself


def _end_process(code: int) -> None:
    tolerate_broken_output.flush()
    hard_exit(code)


class HangWatch:
    """Watch one process: its status, and the thread that watches it and, if it stalls, all ranks of the machine."""

    def __init__(
        self, folder: Path, rank: int, ranks: int, limits: HangConfig, end: Callable[[int], None] = _end_process
    ):
        """Start to watch. Raises OSError if the folder cannot be created."""
        started = process_state(os.getpid()).started
        self._status = hang_watch_folder.create_status_in_run_folder(folder, rank, ranks, started)
        self._folder = folder
        self._rank = rank
        self._end = end
        self._steps = deque[float](maxlen=51)  # seconds of the last steps
        self.limit(limits, 600.0)
        self._answer_stack_signal()
        self._began = time.time()
        now = time.monotonic()
        self._last_look = now
        self._resumed = now  # when this process was last found to have been stopped itself
        self._quiet_until = 0.0  # no alarm before
        self._last_activity = 0.0, 0  # processor seconds and bytes of this process
        self._without_core = seconds_without_core(os.getpid())  # by thread
        self._starved = 0.0  # seconds that this process has waited for a core since its last progress
        self._starved_since = 0.0  # the time of that progress
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watch for hangs", daemon=True)
        rank_status.write_to(self._status)
        self._thread.start()

    def limit(self, limits: HangConfig, timeout: float) -> None:
        """Set the limits. timeout: seconds after which the back end gives up a collective."""
        self._factor = limits.hang_timeout  # of the median step
        self._max_wait = _SHARE_OF_TIMEOUT * timeout  # seconds
        self._floor = min(limits.hang_timeout_floor, self._max_wait)  # seconds
        self._interval = min(1.0, max(0.05, self._floor / 8))

    def step_took(self, seconds: float) -> None:
        """Note the duration of a step, for the median."""
        self._steps.append(seconds)

    def close(self) -> None:
        """Stop watching, and remove this rank's files."""
        self._stopped.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(5.0)
        rank_status.write_to(None)
        hang_watch_folder.leave_run_folder(self._folder, self._rank)
        if self._stacks is not None:
            faulthandler.unregister(_STACK_SIGNAL)
            self._stacks.close()

    def wait_for_diagnosis(self) -> None:
        """Wait, in a main thread whose call failed during an alarm.

        The watcher knows the cause, and ends the process.
        """
        deadline = time.monotonic() + 15.0
        while self._is_alarmed() and time.monotonic() < deadline:
            time.sleep(0.02)

    # ---------------------------------------------------------------- the thread

    def _watch(self) -> None:
        while not self._stopped.wait(self._interval):
            now = time.monotonic()
            if now - self._last_look > max(2.0, self._floor / 2) + self._interval:
                self._resumed = now  # this process was stopped itself, so its stall is no hang
            self._last_look = now
            self._note_activity()
            with contextlib.suppress(OSError):
                if self._is_new("verdict"):
                    self._follow_diagnosis()
                elif now > self._quiet_until and self._stalled(now) > self._allowed_stall():
                    self._raise_alarm()

    def _note_activity(self) -> None:
        """Note in the status whether this process has computed, read or written since the last call."""
        seconds_before, bytes_before = self._last_activity
        seconds = time.process_time()
        moved = process_state(os.getpid()).bytes
        self._last_activity = seconds, moved
        computes = seconds - seconds_before > _ACTIVE * self._interval
        if computes or moved - bytes_before > _ACTIVE_BYTES * self._interval:
            self._status.set_active()
        self._note_starvation()

    def _note_starvation(self) -> None:
        """Note in the status how long this process has waited for a core since its last progress.

        Of its threads the one counts that waited longest.
        """
        waited = seconds_without_core(os.getpid())  # thread -> seconds
        lost = 0.0
        for thread, seconds in waited.items():
            if thread in self._without_core:
                lost = max(lost, seconds - self._without_core[thread])
        self._without_core = waited

        last_progress = self._status.last_heartbeat
        if last_progress == self._starved_since:
            self._starved += lost
        else:
            self._starved = 0.0
            self._starved_since = last_progress
        self._status.set_starved(self._starved)

    def _stalled(self, now: float) -> float:
        """Return the seconds since the last progress of this rank."""
        return now - max(self._status.last_heartbeat, self._resumed)

    def _allowed_stall(self) -> float:
        """Return the seconds without progress after which the ranks are examined."""
        if len(self._steps) < 2 or not self._step_is_known():
            return self._floor
        median = statistics.median(list(self._steps))
        return min(max(self._floor, self._factor * median), self._max_wait)

    def _step_is_known(self) -> bool:
        """Whether this rank is in a step whose length is known from those before."""
        status = read_status(self._path())
        return status is not None and has_known_duration(status)

    def _raise_alarm(self) -> None:
        """Examine all ranks, unless another rank does."""
        if not self._factor or _is_debugged() or not self._claim():
            self._quiet_until = time.monotonic() + min(1.0, self._floor)
            return
        try:
            self._examine()
        finally:
            self._quiet_until = time.monotonic() + self._floor / 2
            (self._folder / "alarm").unlink(missing_ok=True)

    def _claim(self) -> bool:
        """Whether this rank is to examine the others. Removes the alarm of a rank that does not answer any more."""
        alarm = self._folder / "alarm"
        try:
            file = os.open(alarm, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
            with contextlib.suppress(OSError):  # a full disk has space for the name only, which is enough
                os.write(file, f"{os.getpid()} {process_state(os.getpid()).started}".encode())
            os.close(file)
            return True
        except FileExistsError:
            with contextlib.suppress(OSError, ValueError):
                state = process_state(*map(int, alarm.read_text().split()))
                if state.is_stopped or state.has_ended:
                    alarm.unlink(missing_ok=True)
            return False

    # ---------------------------------------------------------------- the rank that examines the others

    def _examine(self) -> None:
        """Look at all ranks of the machine, and end the job if a rank hangs."""
        last_progress = self._status.last_heartbeat
        time.sleep(self._interval)  # the others stall a little later
        ranks = self._look_at_ranks()
        diagnosis = diagnose(ranks, max_idle=self._floor, max_wait=self._max_wait, allowed=self._allowed_stall())
        if self._status.last_heartbeat != last_progress:
            return
        is_hang = bool(diagnosis.hung) or all(rank.status.waiting for rank in ranks)
        if diagnosis.slow or not is_hang:
            self._report_slow(diagnosis)
            return
        with_stacks = []
        for rank in ranks:
            stack = self._stack_of(rank.status) if rank.answers else ""
            with_stacks.append(replace(rank, stack=stack))
        self._announce(diagnosis, hang_report(diagnosis, with_stacks), with_stacks)

    def _look_at_ranks(self) -> list[RankSnapshot]:
        """Return snapshots of all ranks of this machine."""
        statuses = hang_watch_folder.read_statuses(self._folder)
        now = time.monotonic()
        host = socket.gethostname()
        ranks = []
        for status in statuses:
            state = process_state(status.pid, status.started)
            ranks.append(
                RankSnapshot(status, host, state, stalled=now - status.last_heartbeat, idle=now - status.active)
            )
        return ranks

    def _report_slow(self, diagnosis: Diagnosis) -> None:
        """Print that a rank is slow, not more than once a minute, and on one rank."""
        if not diagnosis.hung:
            return
        last_report = self._folder / "slow"
        if last_report.exists():
            seconds = time.time() - last_report.stat().st_mtime
            if seconds < max(self._floor, _SECONDS_BETWEEN_REPORTS):
                return
        last_report.touch()
        tolerate_broken_output.print_stderr(f"rank {self._rank} waits: {diagnosis.headline}")

    def _stack_of(self, status: RankStatus) -> str:
        """Return the stacks that the process writes on request, within half a second."""
        path = self._folder / f"rank_{status.rank:05}.stack"
        if not path.exists():  # the process does not handle the signal, and would die of it
            return ""
        with contextlib.suppress(OSError):
            os.kill(status.pid, _STACK_SIGNAL)
        # complete once its size does not grow any more
        size = -1
        deadline = time.monotonic() + 0.5
        while time.monotonic() < deadline and not 0 < path.stat().st_size == size:
            size = path.stat().st_size
            time.sleep(0.05)
        return path.read_text(errors="replace")

    def _announce(self, diagnosis: Diagnosis, report: str, ranks: list[RankSnapshot]) -> None:
        """Print the report, tell the other ranks, kill those that do not answer, and exit."""
        tolerate_broken_output.print_stderr(report)
        write_error_file(report)

        # write the diagnosis for the other ranks
        content = {"headline": diagnosis.headline, "account": report}
        partial = self._folder / "verdict.partial"
        try:
            partial.write_text(json.dumps(content))
            partial.replace(self._folder / "verdict")
        except OSError as error:  # the others notice that this rank has ended
            tolerate_broken_output.report_lost_output(str(partial), error)
            self._exit()
            return

        # wait until they have read it
        others = [rank for rank in ranks if rank.rank != self._rank]
        deadline = time.monotonic() + 2 * self._interval + 2.0
        while time.monotonic() < deadline:
            if all(self._path("seen", rank.rank).exists() for rank in others if rank.answers):
                break
            time.sleep(0.02)

        # kill those that have not
        killed = []
        for rank in [rank for rank in others if not self._path("seen", rank.rank).exists()]:
            if kill(rank.status.pid, rank.status.started):
                killed.append(rank)
        for rank in killed:
            tolerate_broken_output.print_stderr(f"killed {rank.name}, which does not answer")
        # The last rank to leave removes only the files of dead processes.
        wait_for_ends([(rank.status.pid, rank.status.started) for rank in killed])

        with contextlib.suppress(OSError):  # without the file the others wait some seconds longer
            (self._folder / "go").touch()
        self._exit()

    # ---------------------------------------------------------------- the others

    def _follow_diagnosis(self) -> None:
        """Print why the job ends, tell the examining rank that the diagnosis is read, and exit."""
        content = json.loads((self._folder / "verdict").read_text())
        tolerate_broken_output.print_stderr(f"rank {self._rank}: stopping, because {content['headline']}")
        write_error_file(content["account"], follows=True)
        with contextlib.suppress(OSError):
            self._path("seen").touch()
        deadline = time.monotonic() + 5.0
        while time.monotonic() < deadline and not (self._folder / "go").exists():
            time.sleep(0.02)
        self._exit()

    def _exit(self) -> None:
        """Remove this rank's files, and end the process."""
        hang_watch_folder.leave_run_folder(self._folder, self._rank)
        self._end(HUNG)

    def _is_alarmed(self) -> bool:
        return self._is_new("alarm") or self._is_new("verdict")

    def _is_new(self, name: str) -> bool:
        """Whether a file exists, and was not left by an earlier run in the same folder."""
        try:
            return (self._folder / name).stat().st_mtime >= self._began - 1.0
        except OSError:
            return False

    def _path(self, kind: str = "rank", rank: int | None = None) -> Path:
        """Return the path of a rank's file (default: of this rank)."""
        number = self._rank if rank is None else rank
        return self._folder / f"{kind}_{number:05}"

    def _answer_stack_signal(self) -> None:
        """Write the stacks of all threads to a file at SIGUSR2, unless the script handles the signal itself."""
        self._stacks = None
        with contextlib.suppress(ValueError, OSError, AttributeError):
            if signal.getsignal(_STACK_SIGNAL) is not signal.SIG_DFL:
                return
            partial = self._folder / f"stack_{self._rank:05}"
            self._stacks = partial.open("wb")
            faulthandler.register(_STACK_SIGNAL, self._stacks, all_threads=True, chain=False)
            # From now on the signal may be sent: its sender looks for this name.
            partial.replace(self._folder / f"rank_{self._rank:05}.stack")


def _is_debugged() -> bool:
    """Whether the main thread is in Python's debugger."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None:
        if frame.f_globals.get("__name__") in ("bdb", "pdb"):
            return True
        frame = frame.f_back
    return False


# ---------------------------------------------------------------- the watch of this process

_watch_of_process: HangWatch | None = None


@contextlib.contextmanager
def watching(rank: int, ranks: int) -> Iterator[None]:
    """Watch this process in the block. Without a folder to share, it is not watched."""
    global _watch_of_process
    folder = hang_watch_folder.folder_of_job(os.environ, alone=ranks == 1)
    try:
        _watch_of_process = HangWatch(folder, rank, ranks, HangConfig())
    except OSError as error:
        tolerate_broken_output.report_lost_output(f"{folder}, by which the run finds a rank that hangs,", error)
    try:
        yield
    finally:
        stop_watching()


def stop_watching() -> None:
    """Stop watching this process. Also called before an exit that runs no `finally`."""
    global _watch_of_process
    watch = _watch_of_process
    _watch_of_process = None
    if watch is not None:
        watch.close()


def set_limits(limits: HangConfig, timeout_minutes: float) -> None:
    """Set the limits once the settings are known. timeout_minutes: of the back end's collectives."""
    if _watch_of_process is not None:
        _watch_of_process.limit(limits, 60.0 * timeout_minutes)


def step_took(seconds: float) -> None:
    """Note the duration of a step that has ended."""
    if _watch_of_process is not None:
        _watch_of_process.step_took(seconds)


def wait_for_diagnosis() -> None:
    """Wait, in a main thread whose call failed, while the ranks are examined."""
    if _watch_of_process is not None:
        _watch_of_process.wait_for_diagnosis()
