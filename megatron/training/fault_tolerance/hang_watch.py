"""Find a rank that hangs, say who waits for it in which call, and end the job. Each rank has a thread that watches.

    main thread      writes where it is: phase, iteration, last call on each axis (`core/base/rank_status.py`)
    watcher          sees that its main thread makes no progress for --hang-timeout times the median step; the first to
                     see it
                     looks at all ranks of the machine from outside: places, processes, and then stacks
    verdict          `hang_diagnosis.py` says who hangs, or that nobody does (a slow save, a rank that went on meanwhile)
    end              every rank that answers prints its line and exits with `HUNG`; what hangs is killed

Nothing of it lives in a rank's process: places are files in memory, a process's state is the kernel's, and a stack is
written by
a signal handler that needs no interpreter lock (`faulthandler`). So it works whichever rank is stopped, the first one too.
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

from megatron.core.base import output_streams, rank_status
from megatron.core.base.error_reporting import write_error_file
from megatron.core.base.rank_status import RankStatus, RankStatusWriter, read_status
from megatron.training.arguments.hang_config import HangConfig
from megatron.training.fault_tolerance import hang_watch_folder
from megatron.training.fault_tolerance.hang_diagnosis import Seen, Verdict, hang_report, is_hurried, judge
from megatron.training.fault_tolerance.process_stat import kill, look_at, wait_for_ends, waits_for_cores

HUNG = 4  # exit code of every rank that answers
_ACTIVE = 0.05  # share of a core, and bytes read or written a second, from which on a process does something
_MOVES = 1 << 16
_SAYS_EVERY = 60.0  # seconds
_ASKED = signal.SIGUSR2  # "write your stacks"
_OF_TIMEOUT = 0.9  # share of --distributed-timeout-minutes: after it the back end ends the job by itself


def _end_process(code: int) -> None:
    output_streams.flush()
    os._exit(code)


class HangWatch:
    """The watch of one process: its own place, and the thread that watches it."""

    def __init__(
        self, folder: Path, rank: int, ranks: int, limits: HangConfig, end: Callable[[int], None] = _end_process
    ):
        """Raises OSError if there can be no folder."""
        hang_watch_folder.make_run_folder(folder)
        self._folder, self._rank = folder, rank
        self._end, self._steps = end, deque[float](maxlen=51)
        self.limit(limits, 600.0)
        self._here = RankStatusWriter(self._path(), rank, ranks, look_at(os.getpid()).started)
        self._take_questions()
        self._began = time.time()
        self._excused = self._last_look = time.monotonic()
        self._quiet_until = 0.0
        self._did = 0.0, 0
        self._waits = waits_for_cores(os.getpid())
        self._starved, self._starved_since = 0.0, 0.0
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watch for hangs", daemon=True)
        rank_status.write_to(self._here)
        self._thread.start()

    def limit(self, limits: HangConfig, timeout: float) -> None:
        """timeout: seconds after which the back end gives a collective up."""
        self._times, self._floor = limits.hang_timeout, min(limits.hang_timeout_floor, _OF_TIMEOUT * timeout)
        self._most = _OF_TIMEOUT * timeout
        self._tick = min(1.0, max(0.05, self._floor / 8))

    def step_took(self, seconds: float) -> None:
        self._steps.append(seconds)

    def close(self) -> None:
        """End the watch in order, and leave nothing behind."""
        self._stopped.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(5.0)
        rank_status.write_to(None)
        hang_watch_folder.leave_run_folder(self._folder, self._rank)
        if self._stacks is not None:
            faulthandler.unregister(_ASKED)
            self._stacks.close()

    def wait_for_verdict(self) -> None:
        """For a main thread whose call failed while an alarm is on: the watcher knows more, and ends the process."""
        deadline = time.monotonic() + 15.0
        while self._is_alarmed() and time.monotonic() < deadline:
            time.sleep(0.02)

    # ---------------------------------------------------------------- the thread

    def _watch(self) -> None:
        while not self._stopped.wait(self._tick):
            now = time.monotonic()
            if now - self._last_look > max(2.0, self._floor / 2) + self._tick:
                self._excused = now  # this process was stopped itself
            self._last_look = now
            self._note_activity()
            with contextlib.suppress(OSError):
                if self._is_new("verdict"):
                    self._obey()
                elif now > self._quiet_until and self._stalled(now) > self._allowed():
                    self._raise_alarm()

    def _note_activity(self) -> None:
        seconds, moved = time.process_time(), look_at(os.getpid()).bytes
        before, self._did = self._did, (seconds, moved)
        if seconds - before[0] > _ACTIVE * self._tick or moved - before[1] > _MOVES * self._tick:
            self._here.set_active()
        self._note_starvation()

    def _note_starvation(self) -> None:
        """Of a crowded machine: the time that the thread which waited longest for a core has lost."""
        waits, before = waits_for_cores(os.getpid()), self._waits
        lost = max((seconds - before[thread] for thread, seconds in waits.items() if thread in before), default=0.0)
        went_on = self._here.last_heartbeat
        self._starved = self._starved + lost if went_on == self._starved_since else 0.0
        self._waits, self._starved_since = waits, went_on
        self._here.set_starved(self._starved)

    def _stalled(self, now: float) -> float:
        return now - max(self._here.last_heartbeat, self._excused)

    def _allowed(self) -> float:
        """Seconds without progress after which somebody looks."""
        if len(self._steps) < 2 or not self._is_hurried():
            return self._floor
        return min(max(self._floor, self._times * statistics.median(list(self._steps))), self._most)

    def _is_hurried(self) -> bool:
        place = read_status(self._path())
        return place is not None and is_hurried(place)

    def _raise_alarm(self) -> None:
        if not self._times or _is_debugged() or not self._claim():
            self._quiet_until = time.monotonic() + min(1.0, self._floor)
            return
        try:
            self._examine()
        finally:
            self._quiet_until = time.monotonic() + self._floor / 2
            (self._folder / "alarm").unlink(missing_ok=True)

    def _claim(self) -> bool:
        """Whether this rank is the one that examines; takes the alarm of a rank that does not answer any more."""
        alarm = self._folder / "alarm"
        try:
            file = os.open(alarm, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
            with contextlib.suppress(OSError):  # a full disk has room for the name alone, which says enough
                os.write(file, f"{os.getpid()} {self._here_started()}".encode())
            os.close(file)
            return True
        except FileExistsError:
            with contextlib.suppress(OSError, ValueError):
                state = look_at(*map(int, alarm.read_text().split()))
                if state.is_stopped or state.has_ended:
                    alarm.unlink(missing_ok=True)
            return False

    def _here_started(self) -> int:
        return look_at(os.getpid()).started

    # ---------------------------------------------------------------- the one that examines

    def _examine(self) -> None:
        before = self._here.last_heartbeat
        time.sleep(self._tick)  # the others stall a little later
        seen = self._look()
        verdict = judge(seen, rest=self._floor, patience=self._most, allowed=self._allowed())
        if self._here.last_heartbeat != before:
            return
        if verdict.slow or not (verdict.hung or all(one.place.waiting for one in seen)):
            self._say_slow(verdict)
            return
        seen = [replace(one, stack=self._stack_of(one.place) if one.answers else "") for one in seen]
        self._pronounce(verdict, hang_report(verdict, seen), seen)

    def _look(self) -> list[Seen]:
        """All ranks of this machine."""
        places, now = hang_watch_folder.places_in(self._folder), time.monotonic()
        host = socket.gethostname()
        states = [look_at(place.pid, place.started) for place in places]
        return [
            Seen(one, host, state, now - one.last_heartbeat, now - one.active) for one, state in zip(places, states)
        ]

    def _say_slow(self, verdict: Verdict) -> None:
        """Once in a while, and by one rank."""
        said = self._folder / "slow"
        if verdict.hung and not (said.exists() and time.time() - said.stat().st_mtime < max(self._floor, _SAYS_EVERY)):
            said.touch()
            output_streams.print_stderr(f"rank {self._rank} waits: {verdict.headline}")

    def _stack_of(self, place: RankStatus) -> str:
        """What the process writes when asked, within half a second."""
        path = self._folder / f"rank_{place.rank:05}.stack"
        if not path.exists():  # it would die of the signal
            return ""
        with contextlib.suppress(OSError):
            os.kill(place.pid, _ASKED)
        size, deadline = -1, time.monotonic() + 0.5
        while time.monotonic() < deadline and not 0 < path.stat().st_size == size:
            size = path.stat().st_size
            time.sleep(0.05)
        return path.read_text(errors="replace")

    def _pronounce(self, verdict: Verdict, account: str, seen: list[Seen]) -> None:
        output_streams.print_stderr(account)
        write_error_file(account)
        content = {"headline": verdict.headline, "account": account}
        partial = self._folder / "verdict.partial"
        try:
            partial.write_text(json.dumps(content))
            partial.replace(self._folder / "verdict")
        except OSError as error:  # the others notice that this rank has ended
            output_streams.lose(str(partial), error)
            self._go()
            return
        others = [one for one in seen if one.rank != self._rank and one.answers]
        deadline = time.monotonic() + 2 * self._tick + 2.0
        while time.monotonic() < deadline and not all(self._path("seen", one.rank).exists() for one in others):
            time.sleep(0.02)
        unheard = [one for one in seen if one.rank != self._rank and not self._path("seen", one.rank).exists()]
        for one in (killed := [one for one in unheard if kill(one.place.pid, one.place.started)]):
            output_streams.print_stderr(f"killed {one.name}, which does not answer")
        # The last to leave removes the files of dead processes alone.
        wait_for_ends([(one.place.pid, one.place.started) for one in killed])
        with contextlib.suppress(OSError):  # the others wait no longer than some seconds
            (self._folder / "go").touch()
        self._go()

    # ---------------------------------------------------------------- the others

    def _obey(self) -> None:
        content = json.loads((self._folder / "verdict").read_text())
        output_streams.print_stderr(f"rank {self._rank}: stopping, because {content['headline']}")
        write_error_file(content["account"], follows=True)
        with contextlib.suppress(OSError):
            self._path("seen").touch()
        deadline = time.monotonic() + 5.0
        while time.monotonic() < deadline and not (self._folder / "go").exists():
            time.sleep(0.02)
        self._go()

    def _go(self) -> None:
        hang_watch_folder.leave_run_folder(self._folder, self._rank)
        self._end(HUNG)

    def _is_alarmed(self) -> bool:
        return self._is_new("alarm") or self._is_new("verdict")

    def _is_new(self, name: str) -> bool:
        """Whether the file is there, and not left by an earlier run of the same name."""
        try:
            return (self._folder / name).stat().st_mtime >= self._began - 1.0
        except OSError:
            return False

    def _path(self, kind: str = "rank", rank: int | None = None) -> Path:
        return self._folder / f"{kind}_{self._rank if rank is None else rank:05}"

    def _take_questions(self) -> None:
        """From now on SIGUSR2 writes the stacks of all threads to a file, unless the script has a use for the signal."""
        self._stacks = None
        with contextlib.suppress(ValueError, OSError, AttributeError):
            if signal.getsignal(_ASKED) is signal.SIG_DFL:
                partial = self._folder / f"stack_{self._rank:05}"
                self._stacks = partial.open("wb")
                faulthandler.register(_ASKED, self._stacks, all_threads=True, chain=False)
                partial.replace(self._folder / f"rank_{self._rank:05}.stack")  # it is there: the signal may be sent


def _is_debugged() -> bool:
    """Whether the main thread stands in Python's debugger."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None:
        if frame.f_globals.get("__name__") in ("bdb", "pdb"):
            return True
        frame = frame.f_back
    return False


# ---------------------------------------------------------------- of this process

_mine: HangWatch | None = None


@contextlib.contextmanager
def watching(rank: int, ranks: int) -> Iterator[None]:
    """Watch this process in the block. Without a folder to share, nobody watches."""
    global _mine
    folder = hang_watch_folder.folder_of_job(os.environ, alone=ranks == 1)
    try:
        _mine = HangWatch(folder, rank, ranks, HangConfig())
    except OSError as error:
        output_streams.lose(f"{folder}, by which the run finds a rank that hangs,", error)
    try:
        yield
    finally:
        stop_watching()


def stop_watching() -> None:
    """End the watch of this process. Also called before an exit that runs no `finally`."""
    global _mine
    mine, _mine = _mine, None
    if mine is not None:
        mine.close()


def set_limits(limits: HangConfig, timeout_minutes: float) -> None:
    if _mine is not None:
        _mine.limit(limits, 60.0 * timeout_minutes)


def step_took(seconds: float) -> None:
    """A step has ended after so many seconds."""
    if _mine is not None:
        _mine.step_took(seconds)


def wait_for_verdict() -> None:
    if _mine is not None:
        _mine.wait_for_verdict()
