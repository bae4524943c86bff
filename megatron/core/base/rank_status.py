"""Where this process is: its phase, its iteration, and its last call on each axis, in a small file in memory that others
read.

    write    the main thread, a few words a call; the file is mapped, so that it can be read while this process is stopped
    read     any process of this machine: `read_place(path)`; no thread of the writer takes part

Pure, without torch. Without `write_to` (tests with ranks as threads, tools) every call here returns at once. What the
words are
good for, who watches and what is concluded: `training/fault_tolerance/hang_watch.py`.
"""

import contextlib
import mmap
import os
import struct
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

# In the order of a run. Up to "training" a rank in an earlier phase is one that the others wait for.
PHASES = (
    "starting",
    "reading settings",
    "meeting the others",
    "connecting",
    "agreeing on settings",
    "making groups",
    "building the model",
    "loading the checkpoint",
    "building the data sets",
    "getting ready",
    "training",
    "validating",
    "saving",
    "ending",
)
OPS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send", "recv")
OPS += ("reduce", "gather", "scatter", "barrier")  # of scripts: deepspeed.comm
_MAGIC = 0x4D47_5748_0001
_BYTES = 8192  # of the file
_HEADER, _SLOT = 64, 16  # words of its head and of one slot
# Words of the head.
_PID, _STARTED = 1, 2
_RANK, _RANKS = 3, 4
_ACTIVE, _WENT_ON = 5, 6
_PHASE, _ITERATION = 7, 8
_WAITING, _LAST = 9, 10
_SLOTS, _STEPS = 11, 12
_STARVED = 13
# Words of a slot: name (3), ranks as text (6), peer + 1, calls so far, operation, bytes.
_PEER, _COUNT = 9, 10
_OP, _SIZE = 11, 12
_MOST_SLOTS = (_BYTES // 8 - _HEADER) // _SLOT


@dataclass(frozen=True)
class Calls:
    """The calls of one rank on one axis; transfers between two ranks are counted by peer and direction."""

    axis: str
    group: str  # its ranks, as `group_text` writes them
    peer: int | None  # the other rank of a transfer
    count: int
    op: str  # of the last
    bytes: int  # of the last

    def __str__(self) -> str:
        way = "" if self.peer is None else f" {'to' if self.op == 'send' else 'from'} rank {self.peer}"
        return f"{self.op}{way}, number {self.count} on axis {self.axis} ({self.bytes:,} bytes)"


@dataclass(frozen=True)
class Place:
    """Where a rank was when it last wrote. Times in seconds of `time.monotonic` on its machine."""

    rank: int
    ranks: int
    pid: int
    started: int  # the process's start in clock ticks after boot: with the pid, its identity
    active: float  # when its watcher last saw it compute, read or write
    went_on: float  # of its main thread
    starved: float  # seconds since it went on in which a thread of it was ready to run, and other work had the cores
    phase: str
    iteration: int
    steps: int  # since its start
    waiting: Calls | None  # the call in which it waits
    last: Calls | None  # the last call that it issued
    calls: tuple[Calls, ...]


def group_text(ranks: tuple[int, ...], most: int = 48) -> str:
    """(0, 2, 4, 6) -> "0:8:2"; without an even step "0,1,4,5"; cut at `most` characters."""
    step = ranks[1] - ranks[0] if len(ranks) > 1 else 1
    if step > 0 and ranks == tuple(range(ranks[0], ranks[-1] + 1, step)):
        return f"{ranks[0]}:{ranks[-1] + 1}:{step}"
    return ",".join(map(str, ranks))[:most]


def ranks_of(group: str) -> tuple[int, ...]:
    """The ranks in a `group_text`; of a cut text those that are whole."""
    if ":" in group:
        return tuple(range(*map(int, group.split(":"))))
    words = group.split(",")
    return tuple(int(word) for word in (words[:-1] if len(group) >= 48 else words) if word)


def _make_room(handle: int, path: Path) -> None:
    """Give the file its blocks. Raises OSError where there is no room, which a write into the map would meet as SIGBUS."""
    try:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(handle, 0, _BYTES)
        else:
            os.truncate(handle, _BYTES)
    except OSError:
        path.unlink()
        raise


class Whereabouts:
    """The writer's end. One main thread writes; the watcher's thread writes whether the process does anything."""

    def __init__(self, path: Path, rank: int, ranks: int, started: int):
        self.path = path
        partial = path.with_name(f"{path.name}.{os.getpid()}")
        with partial.open("w+b") as file:
            _make_room(file.fileno(), partial)
            self._map = mmap.mmap(file.fileno(), _BYTES)
        self._words = words = memoryview(self._map).cast("Q")
        self.waited, self._since = 0, 0  # nanoseconds in calls; when the present one began
        self._slots: dict[tuple[str, int, int, str, int], int] = {}
        words[_PID], words[_STARTED] = os.getpid(), started
        words[_RANK], words[_RANKS] = rank, ranks
        words[_ACTIVE] = words[_WENT_ON] = time.monotonic_ns()
        words[0] = _MAGIC
        partial.replace(path)  # in place of that of a process that was killed

    def be_active(self) -> None:
        self._words[_ACTIVE] = time.monotonic_ns()

    def be_starved(self, seconds: float) -> None:
        self._words[_STARVED] = int(1e9 * seconds)

    def go_on(self) -> None:
        self._words[_WENT_ON] = time.monotonic_ns()

    def enter(self, phase: str) -> None:
        self._words[_PHASE] = PHASES.index(phase)
        self.go_on()

    def begin_step(self, iteration: int) -> None:
        self._words[_ITERATION] = iteration
        self._words[_STEPS] += 1
        self.enter("training")

    def issue(self, op: str, name: str, ranks: tuple[int, ...], nbytes: int, peer: int) -> int:
        """Note a call, in which this rank waits until `come_back`; returns its slot."""
        words = self._words
        key = (name, ranks[0], len(ranks), "" if peer < 0 else op, peer)
        slot = self._slots.get(key) or self._new_slot(key, ranks)
        words[slot + _COUNT] += 1
        words[slot + _OP] = OPS.index(op)
        words[slot + _SIZE] = nbytes
        words[_LAST] = words[_WAITING] = slot
        words[_WENT_ON] = self._since = time.monotonic_ns()
        return slot

    def wait(self, slot: int) -> None:
        self._words[_WAITING] = slot
        self._since = time.monotonic_ns()

    def come_back(self) -> None:
        self._words[_WAITING] = 0
        now = self._words[_WENT_ON] = time.monotonic_ns()
        self.waited += now - self._since

    @property
    def went_on(self) -> float:
        return self._words[_WENT_ON] / 1e9

    def _new_slot(self, key: tuple[str, int, int, str, int], ranks: tuple[int, ...]) -> int:
        number = min(len(self._slots), _MOST_SLOTS - 1)  # the last slot is that of all axes that come later
        slot = self._slots[key] = _HEADER + _SLOT * number
        struct.pack_into("24s48s", self._map, 8 * slot, key[0].encode()[:24], group_text(ranks).encode())
        self._words[slot + _PEER] = key[4] + 1
        self._words[_SLOTS] = number + 1
        return slot


def read_place(path: Path) -> Place | None:
    """The place that a rank has written into `path`; None if there is no such file, or it is not one."""
    try:
        data = path.read_bytes()
    except OSError:
        return None
    if len(data) != _BYTES:
        return None
    words = memoryview(data).cast("Q")
    if words[0] != _MAGIC or words[_SLOTS] > _MOST_SLOTS or words[_PHASE] >= len(PHASES):
        return None
    calls = {slot: _calls_at(data, words, slot) for slot in range(_HEADER, _HEADER + _SLOT * words[_SLOTS], _SLOT)}
    return Place(
        rank=words[_RANK],
        ranks=words[_RANKS],
        pid=words[_PID],
        started=words[_STARTED],
        active=words[_ACTIVE] / 1e9,
        went_on=words[_WENT_ON] / 1e9,
        starved=words[_STARVED] / 1e9,
        phase=PHASES[words[_PHASE]],
        iteration=words[_ITERATION],
        steps=words[_STEPS],
        waiting=calls.get(words[_WAITING]),
        last=calls.get(words[_LAST]),
        calls=tuple(calls.values()),
    )


def _calls_at(data: bytes, words: memoryview, slot: int) -> Calls:
    name, group = struct.unpack_from("24s48s", data, 8 * slot)
    text = [part.rstrip(b"\0").decode(errors="replace") for part in (name, group)]
    peer = words[slot + _PEER] - 1 if words[slot + _PEER] else None
    op = OPS[min(words[slot + _OP], len(OPS) - 1)]
    return Calls(*text, peer, words[slot + _COUNT], op, words[slot + _SIZE])


# ---------------------------------------------------------------- of this process

_mine: Whereabouts | None = None


def write_to(whereabouts: Whereabouts | None) -> None:
    """From now on this process's calls are written there; None: nowhere."""
    global _mine
    _mine = whereabouts


@contextlib.contextmanager
def nowhere() -> Iterator[None]:
    """The calls of the block reach no other rank, and are not written."""
    mine = _mine
    write_to(None)
    try:
        yield
    finally:
        write_to(mine)


def issue(op: str, name: str, ranks: tuple[int, ...], nbytes: int, peer: int) -> int:
    return 0 if _mine is None else _mine.issue(op, name, ranks, nbytes, peer)


def wait(slot: int) -> None:
    if _mine is not None:
        _mine.wait(slot)


def come_back() -> None:
    if _mine is not None:
        _mine.come_back()


def waited() -> float:
    """Seconds that this process has spent in calls."""
    return 0.0 if _mine is None else _mine.waited / 1e9


def go_on() -> None:
    """This process has made progress."""
    if _mine is not None:
        _mine.go_on()


def enter(phase: str) -> None:
    """This process begins a phase of the run, one of `PHASES`."""
    if _mine is not None:
        _mine.enter(phase)


@contextlib.contextmanager
def during(phase: str, then: str) -> Iterator[None]:
    """The block is of one phase; after it the process is in another."""
    enter(phase)
    yield
    enter(then)


def begin_step(iteration: int) -> None:
    if _mine is not None:
        _mine.begin_step(iteration)
