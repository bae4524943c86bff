"""The status of this process (its phase, its iteration, its last collective on each axis), in a small file in memory.

    write  the main thread, a few words a call; the file is mapped, so that it can be read while this process is stopped
    read   any process of this machine: `read_status(path)`; no thread of the writer takes part

Without `write_to` (tests with ranks as threads, tools) every call here returns at once. The words are watched, and
hangs are diagnosed from them, in `training/fault_tolerance/hang_watch.py`. Pure, without torch.
"""

import contextlib
import mmap
import os
import struct
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

# In the order of a run. Up to "training" the other ranks wait for a rank in an earlier phase.
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
OPS += ("reduce", "gather", "scatter", "barrier")  # collectives of scripts: deepspeed.comm
OPS += ("all_to_all_v",)

# The file is an array of 64-bit words: a header of 64 words, then slots of 16 words, one for each (axis, group, peer).
#
#     header | slot 0: the first axis | slot 1: the second axis | ...
#
# A slot is named by the index of its first word, so 0 (the header) means "none".
_MAGIC = 0x4D47_5748_0001
_BYTES = 8192  # of the file
_HEADER = 64  # words
_SLOT = 16  # words
# Words of the header.
_PID = 1
_STARTED = 2
_RANK = 3
_RANKS = 4
_ACTIVE = 5
_HEARTBEAT = 6
_PHASE = 7
_ITERATION = 8
_WAITING = 9
_LAST = 10
_SLOTS = 11
_STEPS = 12
_STARVED = 13
# Words of a slot: name (3), ranks as text (6), peer + 1, calls so far, operation, bytes.
_PEER = 9
_COUNT = 10
_OP = 11
_SIZE = 12
_MAX_SLOTS = (_BYTES // 8 - _HEADER) // _SLOT


@dataclass(frozen=True)
class Calls:
    """The calls of one rank on one axis; transfers between two ranks are counted by peer and direction."""

    axis: str
    group: str  # its ranks, as `group_text` writes them
    peer: int | None  # the other rank of a transfer
    count: int
    op: str  # of the last call
    bytes: int  # of the last call

    def __str__(self) -> str:
        direction = ""
        if self.peer is not None:
            direction = f" {'to' if self.op == 'send' else 'from'} rank {self.peer}"
        return f"{self.op}{direction}, number {self.count} on axis {self.axis} ({self.bytes:,} bytes)"


@dataclass(frozen=True)
class RankStatus:
    """The status that a rank wrote last. Times are in seconds of `time.monotonic` on its machine."""

    rank: int
    ranks: int
    pid: int
    started: int  # the process's start in clock ticks after boot: with the pid, its identity
    active: float  # when its watcher last saw it compute, read or write
    last_heartbeat: float  # of its main thread
    starved: float  # seconds since the last heartbeat in which a ready thread waited for a core
    phase: str
    iteration: int
    steps: int  # since its start
    waiting: Calls | None  # the call in which it waits
    last: Calls | None  # the last call that it issued
    calls: tuple[Calls, ...]


def group_text(ranks: tuple[int, ...], most: int = 48) -> str:
    """Return (0, 2, 4, 6) as "0:8:2"; without an even step as "0,1,4,5"; cut at `most` characters."""
    step = ranks[1] - ranks[0] if len(ranks) > 1 else 1
    if step > 0 and ranks == tuple(range(ranks[0], ranks[-1] + 1, step)):
        return f"{ranks[0]}:{ranks[-1] + 1}:{step}"
    return ",".join(map(str, ranks))[:most]


def ranks_of(group: str) -> tuple[int, ...]:
    """Return the ranks in a `group_text`; the last number of a cut text is incomplete and left out."""
    if ":" in group:
        return tuple(range(*map(int, group.split(":"))))
    numbers = group.split(",")
    if len(group) >= 48:
        numbers = numbers[:-1]
    return tuple(int(number) for number in numbers if number)


def _allocate_blocks(handle: int, path: Path) -> None:
    """Allocate the blocks of the file. Raises OSError if memory is full; a later write to the map would be a SIGBUS."""
    try:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(handle, 0, _BYTES)
        else:
            os.truncate(handle, _BYTES)
    except OSError:
        path.unlink()
        raise


class RankStatusWriter:
    """The writer of one rank's status.

    The main thread writes; the watcher's thread writes `set_active`, `set_starved`.
    """

    def __init__(self, path: Path, rank: int, ranks: int, started: int):
        self.path = path
        partial = path.with_name(f"{path.name}.{os.getpid()}")
        with partial.open("w+b") as file:
            _allocate_blocks(file.fileno(), partial)
            self._map = mmap.mmap(file.fileno(), _BYTES)
        self._words = words = memoryview(self._map).cast("Q")
        self.waited = 0  # nanoseconds spent in calls
        self._since = 0  # when the present call began, in nanoseconds
        self._slots: dict[tuple[str, int, int, str, int], int] = {}
        words[_PID] = os.getpid()
        words[_STARTED] = started
        words[_RANK] = rank
        words[_RANKS] = ranks
        words[_ACTIVE] = words[_HEARTBEAT] = time.monotonic_ns()
        words[0] = _MAGIC
        partial.replace(path)  # replaces the file of a killed process

    def set_active(self) -> None:
        """Note that the watcher saw this process compute, read or write."""
        self._words[_ACTIVE] = time.monotonic_ns()

    def set_starved(self, seconds: float) -> None:
        """Note for how long since the last heartbeat a ready thread has waited for a core."""
        self._words[_STARVED] = int(1e9 * seconds)

    def heartbeat(self) -> None:
        self._words[_HEARTBEAT] = time.monotonic_ns()

    def enter(self, phase: str) -> None:
        self._words[_PHASE] = PHASES.index(phase)
        self.heartbeat()

    def begin_step(self, iteration: int) -> None:
        """Note the begin of an iteration, which is training."""
        self._words[_ITERATION] = iteration
        self._words[_STEPS] += 1
        self.enter("training")

    def issue(self, op: str, name: str, ranks: tuple[int, ...], nbytes: int, peer: int) -> int:
        """Note a call, in which this rank waits until `end_wait`; return its slot. peer: -1 for a collective."""
        words = self._words
        key = (name, ranks[0], len(ranks), "" if peer < 0 else op, peer)
        slot = self._slots.get(key) or self._new_slot(key, ranks)
        words[slot + _COUNT] += 1
        words[slot + _OP] = OPS.index(op)
        words[slot + _SIZE] = nbytes
        words[_LAST] = words[_WAITING] = slot
        words[_HEARTBEAT] = self._since = time.monotonic_ns()
        return slot

    def begin_wait(self, slot: int) -> None:
        self._words[_WAITING] = slot
        self._since = time.monotonic_ns()

    def end_wait(self) -> None:
        """Note that the call has returned, and add its time to `waited`."""
        self._words[_WAITING] = 0
        now = self._words[_HEARTBEAT] = time.monotonic_ns()
        self.waited += now - self._since

    @property
    def last_heartbeat(self) -> float:
        return self._words[_HEARTBEAT] / 1e9

    def _new_slot(self, key: tuple[str, int, int, str, int], ranks: tuple[int, ...]) -> int:
        number = min(len(self._slots), _MAX_SLOTS - 1)  # if the file is full, all further axes share the last slot
        slot = self._slots[key] = _HEADER + _SLOT * number
        struct.pack_into("24s48s", self._map, 8 * slot, key[0].encode()[:24], group_text(ranks).encode())
        self._words[slot + _PEER] = key[4] + 1
        self._words[_SLOTS] = number + 1
        return slot


def read_status(path: Path) -> RankStatus | None:
    """Return the status that a rank has written to `path`; None if the file is missing or has another form."""
    try:
        data = path.read_bytes()
    except OSError:
        return None
    if len(data) != _BYTES:
        return None
    words = memoryview(data).cast("Q")
    if words[0] != _MAGIC or words[_SLOTS] > _MAX_SLOTS or words[_PHASE] >= len(PHASES):
        return None
    calls = {slot: _calls_at(data, words, slot) for slot in range(_HEADER, _HEADER + _SLOT * words[_SLOTS], _SLOT)}
    return RankStatus(
        rank=words[_RANK],
        ranks=words[_RANKS],
        pid=words[_PID],
        started=words[_STARTED],
        active=words[_ACTIVE] / 1e9,
        last_heartbeat=words[_HEARTBEAT] / 1e9,
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
    axis, ranks = (part.rstrip(b"\0").decode(errors="replace") for part in (name, group))
    peer = words[slot + _PEER] - 1 if words[slot + _PEER] else None
    op = OPS[min(words[slot + _OP], len(OPS) - 1)]
    return Calls(axis, ranks, peer, words[slot + _COUNT], op, words[slot + _SIZE])


# ---------------------------------------------------------------- the status of this process

_writer: RankStatusWriter | None = None


def write_to(writer: RankStatusWriter | None) -> None:
    """Write this process's calls to `writer` from now on; None: write none."""
    global _writer
    _writer = writer


@contextlib.contextmanager
def without_recording_calls() -> Iterator[None]:
    """Write no calls inside the block: they reach no other rank."""
    writer = _writer
    write_to(None)
    try:
        yield
    finally:
        write_to(writer)


def issue(op: str, name: str, ranks: tuple[int, ...], nbytes: int, peer: int) -> int:
    return 0 if _writer is None else _writer.issue(op, name, ranks, nbytes, peer)


def begin_wait(slot: int) -> None:
    if _writer is not None:
        _writer.begin_wait(slot)


def end_wait() -> None:
    if _writer is not None:
        _writer.end_wait()


def seconds_in_collectives() -> float:
    """Return the seconds that this process has spent in calls."""
    return 0.0 if _writer is None else _writer.waited / 1e9


def heartbeat() -> None:
    """Note that this process has made progress."""
    if _writer is not None:
        _writer.heartbeat()


def enter(phase: str) -> None:
    """Begin a phase of the run, one of `PHASES`."""
    if _writer is not None:
        _writer.enter(phase)


@contextlib.contextmanager
def during(phase: str, then: str) -> Iterator[None]:
    """Enter a phase for the block, and the phase `then` after it. After an error the phase stays."""
    enter(phase)
    yield
    enter(then)


def begin_step(iteration: int) -> None:
    if _writer is not None:
        _writer.begin_step(iteration)
