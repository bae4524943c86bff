"""Lines between the ranks of a job: which of them has not come yet, and which has died. Sockets alone, no torch.

Every rank keeps one line, a TCP connection to the first rank, from the moment it comes until it says goodbye. The system closes
the line of a process however the process ends, so a line that closes without a goodbye is a death, and all ranks hear of it at
once. A rank that is slow, or that runs no Python for minutes, keeps its line: nothing here depends on a rank being prompt.

    a rank, to the first rank    {"token": ..., "rank": 3, "ranks": 4, "name": "rank 3 (on gpu07, process 4711)"}
                                 {"who is missing": true}
                                 {"met": true}               the groups exist: machines are no longer probed
                                 {"goodbye": null}           or the reason, if it leaves before all have come
    the first rank, to a rank    {"welcome": "rank 0 (on gpu01, process 4700)"}, or {"refused": why}
                                 {"missing": [2]}
                                 {"complete": true}
                                 {"lost": "rank 3 (on gpu07, process 4711) has ended without a word"}
                                 {"over": true}              the first rank leaves

A machine that loses power closes no line. While the ranks meet, probes of the TCP connection find it within ten seconds.
Afterwards the connections of the back end, or its time limit, must: a network that is away for some seconds shall end no run.
"""

import contextlib
import json
import os
import resource
import secrets
import selectors
import socket
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from megatron.core.errors import write_error_file

SAYS_EVERY = 30.0  # seconds between two words about who is missing
_GRACE = 4.0  # seconds that a rank has to notice by itself that another has died, and to leave in order
_ANSWERS_WITHIN = 3.0  # seconds in which an address that can be reached accepts a connection
# TCP keepalive: idle seconds (Linux, macOS), seconds between probes, probes without an answer.
_PROBES = {"TCP_KEEPIDLE": 3, "TCP_KEEPALIVE": 3, "TCP_KEEPINTVL": 2, "TCP_KEEPCNT": 3}
_LONGEST = 1 << 16  # bytes of a message; more does not come from a rank

_sockets: "weakref.WeakSet[socket.socket]" = weakref.WeakSet()


def _close_in_child() -> None:
    """A forked worker would hold its parent's line open beyond the parent's death."""
    for each in list(_sockets):
        with contextlib.suppress(OSError):
            os.close(each.detach())  # whatever else in this process refers to it


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_in_child)


class NoLineError(ConnectionError):
    """This rank is not let into the job, or the job cannot come together; the message says why."""


def connection_name(rank: int) -> str:
    """How others speak of this process: "rank 3 (on gpu07, process 4711)"."""
    return f"rank {rank} (on {socket.gethostname()}, process {os.getpid()})"


def listed(ranks: Sequence[int], most: int = 12) -> str:
    """Rank numbers in words: [1, 3, 4, 5] -> "ranks 1, 3 to 5"."""
    spans: list[list[int]] = []
    for rank in sorted(ranks):
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    words = [str(a) if a == b else f"{a}{', ' if b == a + 1 else ' to '}{b}" for a, b in spans[:most]]
    more = sum(b - a + 1 for a, b in spans[most:])
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(words)}" + (f" and {more} more" if more else "")


# ---------------------------------------------------------------- the first rank's end of all lines


@dataclass(eq=False)
class _Peer:
    """The other end of a line, as the first rank sees it; without a rank until it has said who it is."""

    socket: socket.socket
    heard: bytes = b""
    rank: int | None = None
    name: str = ""
    has_left: bool = False


class Exchange:
    """A thread of the first rank that hears every line and tells all of them who is missing and who has died.

    It ends with the goodbye of the first rank itself, which has a line as all others have. awaits_all: whether ranks that have
    not come yet are waited for; otherwise they may come or not.
    """

    def __init__(self, ranks: int, *, awaits_all: bool = True):
        self._ranks = ranks
        self._came: dict[int, _Peer] = {}
        self._complete, self._over = not awaits_all, False
        self._lost = ""
        self._token = secrets.token_hex(8)
        _allow_open_files(4 * ranks + 256)
        dual = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if dual else socket.AF_INET
        self._listener = socket.create_server(("", 0), family=family, backlog=max(128, ranks), dualstack_ipv6=dual)
        _sockets.add(self._listener)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, name="lines of all ranks", daemon=True)
        self._thread.start()

    @property
    def address(self) -> str:
        """What a rank needs to be told, to open its line."""
        hosts = [socket.gethostname()]
        with contextlib.suppress(OSError):
            hosts += socket.gethostbyname_ex(hosts[0])[2]
        return json.dumps({"hosts": hosts, "port": self._listener.getsockname()[1], "token": self._token})

    def tell_late_comers(self, seconds: float) -> None:
        """If a rank has died before all had come, stay so long for the others, who would otherwise wait for those that have
        left."""
        deadline = time.monotonic() + seconds
        while self._lost and len(self._came) < self._ranks and not self._complete and time.monotonic() < deadline:
            time.sleep(0.05)

    def join(self, seconds: float) -> None:
        """Wait, after the first rank's goodbye, until all others have been told."""
        self._thread.join(seconds)

    def _run(self) -> None:
        while not self._over:
            for key, _ in self._selector.select():
                if key.fileobj is self._listener:
                    self._accept()
                else:
                    self._read(key.data)
        for key in list(self._selector.get_map().values()):
            key.fileobj.close()
        self._selector.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            line, _ = self._listener.accept()
            line.setblocking(True)
            line.settimeout(1.0)  # of a send: a message is short, and its receiver reads
            _sockets.add(line)
            _probe(line, True)
            self._selector.register(line, selectors.EVENT_READ, _Peer(line))

    def _read(self, peer: _Peer) -> None:
        try:
            data = peer.socket.recv(_LONGEST)
        except OSError:  # probes without an answer, or a connection that was reset
            data = b""
        *messages, peer.heard = (peer.heard + data).split(b"\n")
        try:
            for message in messages:
                self._hear(peer, json.loads(message))
        except Exception:  # no rank speaks like that, and no stranger may end the thread that all ranks hear from
            data = b""
        if not data or len(peer.heard) > _LONGEST:
            self._hang_up(peer)

    def _hear(self, peer: _Peer, message: dict[str, Any]) -> None:
        if peer.rank is None:
            self._welcome(peer, message)
        elif "who is missing" in message:
            _send(peer.socket, {"missing": [rank for rank in range(self._ranks) if rank not in self._came]})
        elif "met" in message:
            _probe(peer.socket, False)
        elif "goodbye" in message:
            peer.has_left = True
            if not self._complete:
                why = message["goodbye"]
                self._lose(f"{peer.name} has left before all had come{f': {why}' if why else ''}")
            if peer.rank == 0:
                self._tell_all({"over": True})
                self._over = True

    def _welcome(self, peer: _Peer, message: dict[str, Any]) -> None:
        if message["token"] != self._token:
            raise ValueError("a stranger")
        rank, name = int(message["rank"]), str(message["name"])
        if problem := self._problem_of(rank, name, int(message["ranks"])):
            _say(f"rank 0: {problem}")
            _send(peer.socket, {"refused": problem})
            return
        peer.rank, peer.name = rank, name
        self._came[rank] = peer
        _send(peer.socket, {"welcome": connection_name(0)})
        if self._lost:
            _send(peer.socket, {"lost": self._lost})
        elif self._complete:
            _send(peer.socket, {"complete": True})
        elif len(self._came) == self._ranks:
            self._complete = True
            self._tell_all({"complete": True})

    def _problem_of(self, rank: int, name: str, ranks: int) -> str | None:
        """Why this process cannot be of the job, which goes on without it: it may be of another job that was given the same
        port."""
        if ranks != self._ranks:
            return f"{name} was told of {ranks} ranks, rank 0 of {self._ranks}: give all the same number (WORLD_SIZE)"
        if rank in self._came:
            return (
                f"{name} is not the first rank {rank} to come: {self._came[rank].name} is here already; give every process a "
                "rank of its own (RANK), and every job a port of its own (MASTER_PORT)"
            )
        return None

    def _hang_up(self, peer: _Peer) -> None:
        self._selector.unregister(peer.socket)
        peer.socket.close()
        if peer.rank is not None and not peer.has_left:
            self._lose(f"{peer.name} has ended without a word")

    def _lose(self, lost: str) -> None:
        """The first loss is the one to tell of: others follow from it."""
        if not self._lost:
            self._lost = lost
            self._tell_all({"lost": lost})

    def _tell_all(self, message: dict[str, Any]) -> None:
        for peer in self._came.values():
            if not peer.has_left:
                _send(peer.socket, message)


# ---------------------------------------------------------------- one rank's end of its line


def _end_process(why: str) -> None:
    """End a process whose main thread waits in a call that never ends."""
    _say(why)
    write_error_file(why, follows=True)
    sys.stdout.flush()
    os._exit(1)


class Line:
    """This rank's line to the first one. A thread reads it: if another rank has died and this one does not leave within some
    seconds, because it waits for that rank in a call which does not end, the thread ends the process."""

    def __init__(
        self,
        address: str,
        rank: int,
        ranks: int,
        near: Sequence[str],
        *,
        end: Callable[[str], None] = _end_process,
        grace: float = _GRACE,
    ):
        """address: of the `Exchange`. near: hosts to try before those that it names. Raises NoLineError, OSError."""
        told = json.loads(address)
        self._rank, self._ranks = rank, ranks
        self._end, self._grace = end, grace
        self._began = time.monotonic()
        self._socket = _connect(["127.0.0.1", "::1"] if rank == 0 else [*near, *told["hosts"]], told["port"])
        self._messages = self._socket.makefile("rb")
        _send(self._socket, {"token": told["token"], "rank": rank, "ranks": ranks, "name": connection_name(rank)})
        self._socket.settimeout(_ANSWERS_WITHIN * 10)  # the first rank may be busy
        greeting = json.loads(self._messages.readline() or "{}")
        if "welcome" not in greeting:
            raise NoLineError(greeting.get("refused", f"port {told['port']} of the first rank gives no answer"))
        self._socket.settimeout(None)
        self._first, self.lost = greeting["welcome"], ""
        self._complete = False
        self._missing: list[int] | None = None
        self._leaving, self._changed = threading.Event(), threading.Condition()
        self._thread = threading.Thread(target=self._listen, name="line to the first rank", daemon=True)
        self._thread.start()

    def wait_until_all_have_come(self, deadline: float, says_every: float) -> bool:
        """False at the deadline, of `time.monotonic()`, or when a rank is `lost`. Says every so many seconds whom it waits
        for."""
        says = self._began + says_every
        while not (self._complete or self.lost) and (now := time.monotonic()) < deadline:
            if now >= says:
                says += says_every
                _say(waiting(self._rank, self._ranks, self.missing(), self._began))
            self._wait_for(lambda: self._complete or self.lost, min(says, deadline) - time.monotonic())
        return self._complete and not self.lost

    def missing(self) -> str:
        """The ranks that have not come, in words."""
        self._missing = None
        _send(self._socket, {"who is missing": True})
        self._wait_for(lambda: self._missing is not None, _ANSWERS_WITHIN)
        return "other ranks" if self._missing is None else listed(self._missing)

    def _wait_for(self, is_so: Callable[[], Any], seconds: float) -> None:
        with self._changed:
            self._changed.wait_for(is_so, max(0.0, seconds))

    def what_was_lost(self, seconds: float = 0.0) -> str | None:
        """The rank that has died, if one has and the first rank says so within `seconds`."""
        self._wait_for(lambda: self.lost, seconds)
        return self.lost or None

    def all_have_met(self) -> None:
        """From now on calls of the back end connect the ranks, and a machine that does not answer for a while is given time."""
        _probe(self._socket, False)
        _send(self._socket, {"met": True})

    def begin_to_leave(self) -> None:
        """This process is about to end by itself, whoever dies."""
        self._leaving.set()

    def leave(self, why: str | None = None) -> None:
        """Say goodbye: what happens to this process from now on concerns no other rank."""
        self._leaving.set()
        _send(self._socket, {"goodbye": why})
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)

    def _listen(self) -> None:
        try:
            while line := self._messages.readline():
                message = json.loads(line)
                if "over" in message:
                    return
                if "lost" in message:
                    self._lose(message["lost"])
                else:
                    with self._changed:
                        self._complete = self._complete or "complete" in message
                        self._missing = message.get("missing", self._missing)
                        self._changed.notify_all()
        except (OSError, ValueError):  # probes without an answer, or a connection that was reset
            pass
        self._lose(f"{self._first} has ended without a word")

    def _lose(self, lost: str) -> None:
        if self._leaving.is_set():
            return
        with self._changed:
            self.lost = self.lost or lost
            self._changed.notify_all()
        if not self._leaving.wait(self._grace):
            self._end(f"rank {self._rank}: stopping, because {self.lost}")


def waiting(rank: int, ranks: int, for_whom: str, began: float) -> str:
    return f"rank {rank} of {ranks} has waited {time.monotonic() - began:.0f} s for {for_whom} to come"


# ---------------------------------------------------------------- sockets


def answers(host: str, port: int) -> bool:
    """Whether something accepts connections there."""
    with contextlib.suppress(OSError), socket.create_connection((host, port), timeout=_ANSWERS_WITHIN) as line:
        return line.getsockname() != line.getpeername()  # a port that the system hands out may be connected with itself
    return False


def _connect(hosts: Sequence[str], port: int) -> socket.socket:
    for host in dict.fromkeys(hosts):
        with contextlib.suppress(OSError):
            line = socket.create_connection((host, port), timeout=_ANSWERS_WITHIN)
            _sockets.add(line)
            _probe(line, True)
            return line
    raise NoLineError(f"rank 0 cannot be reached at port {port} of {', '.join(dict.fromkeys(hosts))}")


def _probe(line: socket.socket, on: bool) -> None:
    with contextlib.suppress(OSError):
        line.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, int(on))
        for name, value in _PROBES.items():
            if hasattr(socket, name):
                line.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _send(line: socket.socket, message: dict[str, Any]) -> None:
    """A line whose other end has gone is noticed where it is read."""
    with contextlib.suppress(OSError):
        line.sendall(json.dumps(message).encode() + b"\n")


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _allow_open_files(number: int) -> None:
    """Raise this process' limit if so many files are more than it allows; the first rank holds a few for each other rank."""
    with contextlib.suppress(ValueError, OSError):
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        if soft != resource.RLIM_INFINITY and soft < number:
            allowed = number if hard == resource.RLIM_INFINITY else min(number, hard)
            resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
