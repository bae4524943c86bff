"""Missing and dead ranks of a job are detected by one TCP connection per rank to rank 0. Sockets only, no torch.

Each rank holds its connection from its start until its goodbye. The system closes the connection when a process ends,
even if it is killed: a connection that closes without a goodbye means that the rank has died, and rank 0 tells all
ranks at once. A slow rank, or one that runs no Python for minutes, keeps its connection: there are no heartbeats.

    a rank, to rank 0    {"token": ..., "rank": 3, "ranks": 4, "name": "rank 3 (on gpu07, process 4711)"}
                         {"who is missing": true}
                         {"met": true}               the groups exist: TCP probes stop
                         {"goodbye": null}           or the reason, if it leaves before all ranks have come
    rank 0, to a rank    {"welcome": "rank 0 (on gpu01, process 4700)"}, or {"refused": reason}
                         {"missing": [2]}
                         {"complete": true}          all ranks have come
                         {"lost": "rank 3 (on gpu07, process 4711) has ended without a word"}
                         {"over": true}              rank 0 leaves

A machine that loses power does not close its connections. During the rendezvous TCP probes detect it within ten
seconds. Afterwards the backend's connections or its timeout must, so that a network outage of a few seconds does not
end a run.
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

from megatron.core.base import tolerate_broken_output
from megatron.core.base.exit_callbacks_and_hard_exit import hard_exit
from megatron.core.base.user_error_and_torchrun_error_file import write_error_file

REPORT_SECONDS = 30.0  # between reports of missing ranks
_GRACE_SECONDS = 4.0  # for a rank to stop in order after another has died
_ANSWER_SECONDS = 3.0  # for a reachable address to accept a connection
# TCP keepalive: idle seconds (Linux, macOS), seconds between probes, probes without an answer.
_PROBES = {"TCP_KEEPIDLE": 3, "TCP_KEEPALIVE": 3, "TCP_KEEPINTVL": 2, "TCP_KEEPCNT": 3}
_MAX_MESSAGE = 1 << 16  # bytes of a message; more does not come from a rank of this job

_sockets: "weakref.WeakSet[socket.socket]" = weakref.WeakSet()


def _close_in_child() -> None:
    """Close the connections in a forked worker, which would keep them open after its parent's death."""
    for connection in list(_sockets):
        with contextlib.suppress(OSError):
            os.close(connection.detach())  # even if other objects of this process refer to it


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_in_child)


class UnreachableError(ConnectionError):
    """Rank 0 cannot be reached, or refuses this rank; the message gives the reason."""


class RankRejectedError(UnreachableError):
    """Rank 0 answers, and refuses this rank."""


def name_of_this_process(rank: int) -> str:
    """Return the name of this process in messages: "rank 3 (on gpu07, process 4711)"."""
    return f"rank {rank} (on {socket.gethostname()}, process {os.getpid()})"


def ranks_as_text(ranks: Sequence[int], most: int = 12) -> str:
    """Return rank numbers as text: [1, 3, 4, 5] -> "ranks 1, 3 to 5"."""
    spans: list[list[int]] = []
    for rank in sorted(ranks):
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    words = []
    for first, last in spans[:most]:
        if first == last:
            words.append(str(first))
        elif last == first + 1:
            words.append(f"{first}, {last}")
        else:
            words.append(f"{first} to {last}")
    text = f"rank{'s' if len(ranks) > 1 else ''} {', '.join(words)}"
    more = sum(last - first + 1 for first, last in spans[most:])
    return f"{text} and {more} more" if more else text


# ---------------------------------------------------------------- rank 0's end of all connections


@dataclass(eq=False)
class _Peer:
    """A connection at rank 0; `rank` is None until the other end has sent its first message."""

    socket: socket.socket
    received: bytes = b""  # the start of a message whose end has not arrived
    rank: int | None = None
    name: str = ""
    has_left: bool = False


class LivenessServer:
    """A thread of rank 0 that reads all connections, and tells all ranks which ranks are missing or dead.

    Rank 0 has a connection too; its goodbye ends the thread.

    awaits_all: whether the job is incomplete until all ranks have come.
    """

    def __init__(self, ranks: int, *, awaits_all: bool = True):
        self._ranks = ranks
        self._peers: dict[int, _Peer] = {}  # by rank, of the ranks that have come
        self._complete = not awaits_all
        self._over = False
        self._lost = ""  # the message about the first loss
        self._token = secrets.token_hex(8)
        _allow_open_files(4 * ranks + 256)
        dual = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if dual else socket.AF_INET
        self._listener = socket.create_server(("", 0), family=family, backlog=max(128, ranks), dualstack_ipv6=dual)
        _sockets.add(self._listener)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, name="liveness of all ranks", daemon=True)
        self._thread.start()

    @property
    def address(self) -> str:
        """Hosts, port and token in JSON, from which a rank opens its connection."""
        hosts = [socket.gethostname()]
        with contextlib.suppress(OSError):
            hosts += socket.gethostbyname_ex(hosts[0])[2]
        return json.dumps({"hosts": hosts, "port": self._listener.getsockname()[1], "token": self._token})

    def tell_late_ranks(self, seconds: float) -> None:
        """Tell ranks that come late of a death during the rendezvous: wait for them, at most `seconds`."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if not self._lost or self._complete or len(self._peers) == self._ranks:
                return
            time.sleep(0.05)

    def join(self, seconds: float) -> None:
        """Wait, after rank 0's goodbye, until all other ranks are told."""
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
            connection, _ = self._listener.accept()
            connection.setblocking(True)
            connection.settimeout(1.0)  # for sends: a message is short, and its receiver reads
            _sockets.add(connection)
            _probe(connection, True)
            self._selector.register(connection, selectors.EVENT_READ, _Peer(connection))

    def _read(self, peer: _Peer) -> None:
        try:
            data = peer.socket.recv(_MAX_MESSAGE)
        except OSError:  # unanswered probes, or a reset connection
            data = b""
        *messages, peer.received = (peer.received + data).split(b"\n")
        try:
            for message in messages:
                self._handle(peer, _message_in(message))
        except Exception as error:  # hang up, since no stranger may end this thread; of a rank's all are told
            if peer.rank is not None:
                self._lose(f"{peer.name} has sent rank 0 what it cannot read ({error})")
            data = b""
        if not data or len(peer.received) > _MAX_MESSAGE:
            self._hang_up(peer)

    def _handle(self, peer: _Peer, message: dict[str, Any]) -> None:
        if peer.rank is None:
            self._welcome(peer, message)
        elif "who is missing" in message:
            _send(peer.socket, {"missing": [rank for rank in range(self._ranks) if rank not in self._peers]})
        elif "met" in message:
            _probe(peer.socket, False)
        elif "goodbye" in message:
            peer.has_left = True
            if not self._complete:
                reason = f": {message['goodbye']}" if message["goodbye"] else ""
                self._lose(f"{peer.name} has left before all had come{reason}")
            if peer.rank == 0:
                self._tell_all({"over": True})
                self._over = True

    def _welcome(self, peer: _Peer, message: dict[str, Any]) -> None:
        if message["token"] != self._token:
            raise ValueError("a stranger")
        rank = int(message["rank"])
        name = str(message["name"])
        if self._lost and rank in self._peers:
            raise ValueError("a rank of the next attempt: the launcher has started it before this attempt has ended")
        problem = self._problem_of(rank, name, int(message["ranks"]))
        if problem:
            tolerate_broken_output.print_stderr(f"rank 0: {problem}")
            _send(peer.socket, {"refused": problem})
            return
        peer.rank = rank
        peer.name = name
        self._peers[rank] = peer
        _send(peer.socket, {"welcome": name_of_this_process(0)})
        if self._lost:
            _send(peer.socket, {"lost": self._lost})
        elif self._complete:
            _send(peer.socket, {"complete": True})
        elif len(self._peers) == self._ranks:
            self._complete = True
            self._tell_all({"complete": True})

    def _problem_of(self, rank: int, name: str, ranks: int) -> str | None:
        """Return why a process is refused; None if it is not. It may belong to another job on this port."""
        if ranks != self._ranks:
            return f"{name} expects {ranks} ranks, rank 0 expects {self._ranks}; give all processes the same WORLD_SIZE"
        if rank in self._peers:
            return (
                f"{name} has the same rank {rank} as {self._peers[rank].name}; give each process its own RANK, and each "
                "job its own MASTER_PORT"
            )
        return None

    def _hang_up(self, peer: _Peer) -> None:
        self._selector.unregister(peer.socket)
        peer.socket.close()
        if peer.rank is not None and not peer.has_left:
            self._lose(f"{peer.name} has ended without a word")

    def _lose(self, lost: str) -> None:
        """Tell all ranks of the first loss; later losses follow from it."""
        if not self._lost:
            self._lost = lost
            self._tell_all({"lost": lost})

    def _tell_all(self, message: dict[str, Any]) -> None:
        for peer in self._peers.values():
            if not peer.has_left:
                _send(peer.socket, message)


# ---------------------------------------------------------------- one rank's end of its connection


def _end_process(reason: str) -> None:
    """End this process, whose main thread waits in a call that never returns."""
    tolerate_broken_output.print_stderr(reason)
    write_error_file(reason, follows=True)
    tolerate_broken_output.flush()
    hard_exit(1)


class LivenessClient:
    """This rank's connection to rank 0, read by a thread.

    If another rank dies and this process does not stop within `grace` seconds, since it waits for that rank in a call
    that never returns, the thread ends the process.
    """

    def __init__(
        self,
        address: str,
        rank: int,
        ranks: int,
        near: Sequence[str],
        *,
        end: Callable[[str], None] = _end_process,
        grace: float = _GRACE_SECONDS,
    ):
        """Connect to rank 0. address: `LivenessServer.address`. near: hosts to try before the hosts in it.

        Raises UnreachableError, OSError.
        """
        server = json.loads(address)
        self.token = server["token"]  # the same on all ranks of this rendezvous, and of no other
        self._rank = rank
        self._ranks = ranks
        self._end = end
        self._grace = grace
        self._began = time.monotonic()

        # connect, and say who this is
        hosts = ["127.0.0.1", "::1"] if rank == 0 else [*near, *server["hosts"]]
        self._socket = _connect(hosts, server["port"])
        self._messages = self._socket.makefile("rb")
        _send(
            self._socket, {"token": server["token"], "rank": rank, "ranks": ranks, "name": name_of_this_process(rank)}
        )

        # read the answer
        self._socket.settimeout(_ANSWER_SECONDS * 10)  # rank 0 may be busy
        answer = self._messages.readline()
        try:
            greeting = _message_in(answer or b"{}")
        except ValueError:
            raise UnreachableError(
                f"what answers at port {server['port']} is not rank 0 of this job: it says {answer[:80]!r}"
            ) from None
        if "welcome" not in greeting:
            if "refused" in greeting:
                raise RankRejectedError(greeting["refused"])
            raise UnreachableError(f"rank 0 does not answer at port {server['port']}")
        self._socket.settimeout(None)

        # read further messages in a thread
        self._rank_0 = greeting["welcome"]  # its name in messages
        self.lost = ""  # the message about a dead rank
        self._complete = False
        self._missing: list[int] | None = None
        self._leaving = threading.Event()
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._listen, name="liveness of rank 0", daemon=True)
        self._thread.start()

    def wait_for_all_ranks(self, deadline: float, report_seconds: float) -> bool:
        """Wait for all ranks; return False at the deadline (`time.monotonic()`) or if a rank is lost.

        Reports the missing ranks to stderr every `report_seconds` seconds.
        """
        next_report = self._began + report_seconds
        while not (self._complete or self.lost):
            now = time.monotonic()
            if now >= deadline:
                break
            if now >= next_report:
                next_report += report_seconds
                tolerate_broken_output.print_stderr(
                    waiting_message(self._rank, self._ranks, self.missing(), self._began)
                )
            self._wait_for(lambda: self._complete or self.lost, min(next_report, deadline) - time.monotonic())
        return self._complete and not self.lost

    def missing(self) -> str:
        """Return the missing ranks as text, as rank 0 knows them."""
        self._missing = None
        _send(self._socket, {"who is missing": True})
        self._wait_for(lambda: self._missing is not None, _ANSWER_SECONDS)
        return "other ranks" if self._missing is None else ranks_as_text(self._missing)

    def _wait_for(self, condition: Callable[[], Any], seconds: float) -> None:
        with self._changed:
            self._changed.wait_for(condition, max(0.0, seconds))

    def lost_rank(self, seconds: float = 0.0) -> str | None:
        """Return the message about a dead rank, if one arrives within `seconds`; else None."""
        self._wait_for(lambda: self.lost, seconds)
        return self.lost or None

    def stop_tcp_probes(self) -> None:
        """End the TCP probes: from now on the backend connects the ranks, and a short network outage ends no run."""
        _probe(self._socket, False)
        _send(self._socket, {"met": True})

    def begin_leaving(self) -> None:
        """Note that this process is ending by itself: a loss no longer ends it."""
        self._leaving.set()

    def leave(self, reason: str | None = None) -> None:
        """Say goodbye: the end of this process is no longer a loss. reason: given if not all ranks have come."""
        self._leaving.set()
        _send(self._socket, {"goodbye": reason})
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)

    def _listen(self) -> None:
        lost = "has ended without a word"
        try:
            while (line := self._messages.readline()).endswith(b"\n"):  # a part of a line: cut off by the end
                message = _message_in(line)
                if "over" in message:
                    return
                if "lost" in message:
                    self._lose(message["lost"])
                else:
                    with self._changed:
                        self._complete = self._complete or "complete" in message
                        self._missing = message.get("missing", self._missing)
                        self._changed.notify_all()
        except OSError:  # unanswered probes, or a reset connection
            pass
        except ValueError as error:
            lost = f"has sent rank {self._rank} what it cannot read ({error})"
        self._lose(f"{self._rank_0} {lost}")

    def _lose(self, lost: str) -> None:
        if self._leaving.is_set():
            return
        with self._changed:
            self.lost = self.lost or lost
            self._changed.notify_all()
        if not self._leaving.wait(self._grace):
            self._end(f"rank {self._rank}: stopping, because {self.lost}")


def waiting_message(rank: int, ranks: int, missing: str, began: float) -> str:
    return f"rank {rank} of {ranks} has waited {time.monotonic() - began:.0f} s for {missing} to come"


# ---------------------------------------------------------------- sockets


def answers(host: str, port: int) -> bool:
    """Return whether the port accepts connections."""
    with contextlib.suppress(OSError), socket.create_connection((host, port), timeout=_ANSWER_SECONDS) as connection:
        return connection.getsockname() != connection.getpeername()  # an ephemeral port can connect to itself
    return False


def refuses(host: str, port: int) -> bool:
    """Return whether the host answers that nobody listens at its port.

    False without an answer: the network may be down.
    """
    try:
        socket.create_connection((host, port), timeout=_ANSWER_SECONDS).close()
    except ConnectionRefusedError:
        return True
    except OSError:
        pass
    return False


def _connect(hosts: Sequence[str], port: int) -> socket.socket:
    for host in dict.fromkeys(hosts):
        with contextlib.suppress(OSError):
            connection = socket.create_connection((host, port), timeout=_ANSWER_SECONDS)
            _sockets.add(connection)
            _probe(connection, True)
            return connection
    raise UnreachableError(f"rank 0 cannot be reached at port {port} of {', '.join(dict.fromkeys(hosts))}")


def _probe(connection: socket.socket, on: bool) -> None:
    """Switch TCP keepalive probes on or off."""
    with contextlib.suppress(OSError):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, int(on))
        for name, value in _PROBES.items():
            if hasattr(socket, name):
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _send(connection: socket.socket, message: dict[str, Any]) -> None:
    """Send a message; a closed connection is noticed by its reader."""
    with contextlib.suppress(OSError):
        connection.sendall(json.dumps(message).encode() + b"\n")


def _message_in(line: bytes) -> dict[str, Any]:
    """Return the message of a line. Raises ValueError if it has none."""
    message = json.loads(line)
    if not isinstance(message, dict):
        raise ValueError(f"{line[:80]!r} is no message")
    return message


def _allow_open_files(number: int) -> None:
    """Raise this process's limit of open files to `number` if possible: rank 0 holds a few for each rank."""
    with contextlib.suppress(ValueError, OSError):
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        if soft != resource.RLIM_INFINITY and soft < number:
            allowed = number if hard == resource.RLIM_INFINITY else min(number, hard)
            resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
