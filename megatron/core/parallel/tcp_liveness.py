"""Lines between the ranks of a job: they detect missing and dead ranks. Sockets only, no torch.

Each rank keeps one line, a TCP connection to rank 0, from its start until its goodbye. The system closes the line when a
process ends, even if it is killed: a line that closes without a goodbye means that the rank has died, and rank 0 tells all
ranks at once. A slow rank, or one that runs no Python for minutes, keeps its line: there are no heartbeats.

    a rank, to the first rank    {"token": ..., "rank": 3, "ranks": 4, "name": "rank 3 (on gpu07, process 4711)"}
                                 {"who is missing": true}
                                 {"met": true}               the groups exist: TCP probes stop
                                 {"goodbye": null}           or the reason, if it leaves before all ranks have come
    the first rank, to a rank    {"welcome": "rank 0 (on gpu01, process 4700)"}, or {"refused": why}
                                 {"missing": [2]}
                                 {"complete": true}
                                 {"lost": "rank 3 (on gpu07, process 4711) has ended without a word"}
                                 {"over": true}              the first rank leaves

A machine that loses power does not close its lines. During the rendezvous TCP probes detect it within ten seconds.
Afterwards the
backend's connections or its timeout must, so that a network outage of a few seconds does not end a run.
"""

import contextlib
import json
import os
import resource
import secrets
import selectors
import socket
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from megatron.core.base import output_streams
from megatron.core.base.error_reporting import write_error_file

SAYS_EVERY = 30.0  # seconds between reports of missing ranks
_GRACE = 4.0  # seconds for a rank to stop in order after another has died
_ANSWERS_WITHIN = 3.0  # seconds for a reachable address to accept a connection
# TCP keepalive: idle seconds (Linux, macOS), seconds between probes, probes without an answer.
_PROBES = {"TCP_KEEPIDLE": 3, "TCP_KEEPALIVE": 3, "TCP_KEEPINTVL": 2, "TCP_KEEPCNT": 3}
_LONGEST = 1 << 16  # bytes of a message; more does not come from a rank of this job

_sockets: "weakref.WeakSet[socket.socket]" = weakref.WeakSet()


def _close_in_child() -> None:
    """Closes the lines in a forked worker, which would keep them open after its parent's death."""
    for each in list(_sockets):
        with contextlib.suppress(OSError):
            os.close(each.detach())  # even if other objects of this process refer to it


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_in_child)


class NoLineError(ConnectionError):
    """Rank 0 cannot be reached, or refuses this rank; the message says why."""


class RefusedError(NoLineError):
    """Rank 0 answers, and refuses this rank."""


def connection_name(rank: int) -> str:
    """The name of this process in messages: "rank 3 (on gpu07, process 4711)"."""
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
    """A line at rank 0; `rank` is None until the other end has introduced itself."""

    socket: socket.socket
    heard: bytes = b""
    rank: int | None = None
    name: str = ""
    has_left: bool = False


class Exchange:
    """A thread of rank 0 that reads all lines, and tells all ranks which ranks are missing or dead.

    Rank 0 has a line too; its goodbye ends the thread. awaits_all: whether the job is incomplete until all ranks have come.
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
        """Hosts, port and token in JSON, from which a rank opens its line."""
        hosts = [socket.gethostname()]
        with contextlib.suppress(OSError):
            hosts += socket.gethostbyname_ex(hosts[0])[2]
        return json.dumps({"hosts": hosts, "port": self._listener.getsockname()[1], "token": self._token})

    def tell_late_comers(self, seconds: float) -> None:
        """If a rank has died during the rendezvous, waits for the ranks that come later, at most `seconds`, to tell them."""
        deadline = time.monotonic() + seconds
        while self._lost and len(self._came) < self._ranks and not self._complete and time.monotonic() < deadline:
            time.sleep(0.05)

    def join(self, seconds: float) -> None:
        """Waits, after rank 0's goodbye, until all other ranks are told."""
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
            line.settimeout(1.0)  # for sends: a message is short, and its receiver reads
            _sockets.add(line)
            _probe(line, True)
            self._selector.register(line, selectors.EVENT_READ, _Peer(line))

    def _read(self, peer: _Peer) -> None:
        try:
            data = peer.socket.recv(_LONGEST)
        except OSError:  # unanswered probes, or a reset connection
            data = b""
        *messages, peer.heard = (peer.heard + data).split(b"\n")
        try:
            for message in messages:
                self._hear(peer, json.loads(message))
        except Exception:  # not a message of a rank: hang up, since no stranger may end this thread
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
        if self._lost and rank in self._came:
            raise ValueError("of the next attempt: a launcher has started it again before this one has ended")
        if problem := self._problem_of(rank, name, int(message["ranks"])):
            output_streams.print_stderr(f"rank 0: {problem}")
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
        """Why a process is refused; None if it is not. The job goes on without it: it may belong to another job on
        this port."""
        if ranks != self._ranks:
            return f"{name} expects {ranks} ranks, rank 0 expects {self._ranks}; give all processes the same WORLD_SIZE"
        if rank in self._came:
            return (
                f"{name} has the same rank {rank} as {self._came[rank].name}; give each process its own RANK, and each "
                "job its own MASTER_PORT"
            )
        return None

    def _hang_up(self, peer: _Peer) -> None:
        self._selector.unregister(peer.socket)
        peer.socket.close()
        if peer.rank is not None and not peer.has_left:
            self._lose(f"{peer.name} has ended without a word")

    def _lose(self, lost: str) -> None:
        """Tells all ranks of the first loss; later losses follow from it."""
        if not self._lost:
            self._lost = lost
            self._tell_all({"lost": lost})

    def _tell_all(self, message: dict[str, Any]) -> None:
        for peer in self._came.values():
            if not peer.has_left:
                _send(peer.socket, message)


# ---------------------------------------------------------------- one rank's end of its line


def _end_process(why: str) -> None:
    """Ends this process, whose main thread waits in a call that never returns."""
    output_streams.print_stderr(why)
    write_error_file(why, follows=True)
    output_streams.flush()
    os._exit(1)


class Line:
    """This rank's line to rank 0, read by a thread.

    If another rank dies and this process does not stop within `grace` seconds, since it waits for that rank in a call that
    never returns, the thread ends the process.
    """

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
        """address: `Exchange.address`. near: hosts to try before the hosts in it. Raises NoLineError, OSError."""
        told = json.loads(address)
        self.token = told["token"]  # the same on all ranks that meet here, and at no other meeting
        self._rank, self._ranks = rank, ranks
        self._end, self._grace = end, grace
        self._began = time.monotonic()
        self._socket = _connect(["127.0.0.1", "::1"] if rank == 0 else [*near, *told["hosts"]], told["port"])
        self._messages = self._socket.makefile("rb")
        _send(self._socket, {"token": told["token"], "rank": rank, "ranks": ranks, "name": connection_name(rank)})
        self._socket.settimeout(_ANSWERS_WITHIN * 10)  # rank 0 may be busy
        greeting = json.loads(self._messages.readline() or "{}")
        if "welcome" not in greeting:
            if "refused" in greeting:
                raise RefusedError(greeting["refused"])
            raise NoLineError(f"port {told['port']} of rank 0 does not answer")
        self._socket.settimeout(None)
        self._first, self.lost = greeting["welcome"], ""
        self._complete = False
        self._missing: list[int] | None = None
        self._leaving, self._changed = threading.Event(), threading.Condition()
        self._thread = threading.Thread(target=self._listen, name="line to the first rank", daemon=True)
        self._thread.start()

    def wait_until_all_have_come(self, deadline: float, says_every: float) -> bool:
        """Waits for all ranks; False at the deadline (`time.monotonic()`) or if a rank is lost. Reports the missing ranks to
        stderr every `says_every` seconds."""
        says = self._began + says_every
        while not (self._complete or self.lost) and (now := time.monotonic()) < deadline:
            if now >= says:
                says += says_every
                output_streams.print_stderr(waiting(self._rank, self._ranks, self.missing(), self._began))
            self._wait_for(lambda: self._complete or self.lost, min(says, deadline) - time.monotonic())
        return self._complete and not self.lost

    def missing(self) -> str:
        """The missing ranks in words, as rank 0 knows them."""
        self._missing = None
        _send(self._socket, {"who is missing": True})
        self._wait_for(lambda: self._missing is not None, _ANSWERS_WITHIN)
        return "other ranks" if self._missing is None else listed(self._missing)

    def _wait_for(self, is_so: Callable[[], Any], seconds: float) -> None:
        with self._changed:
            self._changed.wait_for(is_so, max(0.0, seconds))

    def what_was_lost(self, seconds: float = 0.0) -> str | None:
        """The message about a dead rank, if one arrives within `seconds`; else None."""
        self._wait_for(lambda: self.lost, seconds)
        return self.lost or None

    def all_have_met(self) -> None:
        """Ends the TCP probes: from now on the backend connects the ranks, and a short network outage ends no run."""
        _probe(self._socket, False)
        _send(self._socket, {"met": True})

    def begin_to_leave(self) -> None:
        """Notes that this process is ending by itself: a loss no longer ends it."""
        self._leaving.set()

    def leave(self, why: str | None = None) -> None:
        """Says goodbye: the end of this process is no longer a loss. why: the reason, if not all ranks have come."""
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
        except (OSError, ValueError):  # unanswered probes, or a reset connection
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
    """Whether the port accepts connections."""
    with contextlib.suppress(OSError), socket.create_connection((host, port), timeout=_ANSWERS_WITHIN) as line:
        return line.getsockname() != line.getpeername()  # an ephemeral port can connect to itself
    return False


def refuses(host: str, port: int) -> bool:
    """Whether the host is there, and nobody listens at its port. False without an answer: the network may be gone for
    a while."""
    try:
        socket.create_connection((host, port), timeout=_ANSWERS_WITHIN).close()
    except ConnectionRefusedError:
        return True
    except OSError:
        pass
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
    """Sends a message; a closed line is noticed by its reader."""
    with contextlib.suppress(OSError):
        line.sendall(json.dumps(message).encode() + b"\n")


def _allow_open_files(number: int) -> None:
    """Raises this process's limit of open files to `number` if possible: rank 0 holds a few for each rank."""
    with contextlib.suppress(ValueError, OSError):
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        if soft != resource.RLIM_INFINITY and soft < number:
            allowed = number if hard == resource.RLIM_INFINITY else min(number, hard)
            resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
