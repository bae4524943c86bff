"""Messages between the processes that write checkpoints: with their rank, and with each other by way of rank 0's.

No torch.

            writer 1
               |                 every writer sends its value to writer 0, which combines them and sends all the result;
    writer 2 - writer 0 - ...    there is one such exchange for each step of a save

A `WriterGroup` makes the exchanges, as a `SaveGroup` of write_and_publish.py. These are sockets and no process group,
so training's collectives can run at the same time. A writer that ends closes its sockets, and all others fail at
their next exchange.
"""

import contextlib
import hmac
import json
import os
import secrets
import socket
from collections.abc import Callable, Iterator
from typing import Any

_LENGTH_BYTES = 8  # of a message's length, which comes first
_CONNECT_TIMEOUT = 30.0  # seconds for the writers of a job to connect
_RECEIVE_BYTES = 1 << 20  # bytes received at a time


class OtherRankError(RuntimeError):
    """Another rank's part of a save has failed; the message is that rank's."""


class MessageSocket:
    """One end of a socket that carries JSON messages, and with them handles of open files."""

    def __init__(self, line: socket.socket):
        self.line = line
        self.handles: list[int] = []  # received with messages; the reader must close them

    def send(self, message: Any, *handles: int) -> None:
        """Send a message and, with it, handles of open files."""
        data = json.dumps(message).encode()
        length = len(data).to_bytes(_LENGTH_BYTES, "little")
        # In one call: TCP would hold the data back until the length is acknowledged, some 40 ms later.
        sent = socket.send_fds(self.line, [length, data], handles)
        self.line.sendall((length + data)[sent:])

    def receive(self) -> Any:
        """Wait for the next message. Raises ConnectionError if the other end is gone."""
        try:
            length, handles = socket.recv_fds(self.line, _LENGTH_BYTES, 1)[:2]
            self.handles += handles
            length += self._receive_bytes(_LENGTH_BYTES - len(length))
            return json.loads(self._receive_bytes(int.from_bytes(length, "little")))
        except OSError as error:
            raise ConnectionError(str(error)) from error

    def _receive_bytes(self, count: int) -> bytes:
        data = bytearray()
        while len(data) < count:
            received = self.line.recv(min(count - len(data), _RECEIVE_BYTES))
            if not received:
                raise ConnectionError("the other end is gone")
            data += received
        return bytes(data)

    def close(self) -> None:
        """Close the socket; the other end notices, even where a third process has a copy of this one."""
        with contextlib.suppress(OSError):
            self.line.shutdown(socket.SHUT_RDWR)
        self.line.close()


class WriterGroup:
    """The writers of all ranks, as a `SaveGroup`: every writer makes the same calls in the same order.

    sockets: on the first writer those to ranks 1, 2, ..., on any other the one to the first.
    """

    def __init__(self, rank: int, sockets: list[MessageSocket]):
        self.rank = rank
        self._sockets = sockets

    def _exchange(self, value: Any, combine: Callable[[list[Any]], Any]) -> Any:
        """Return, on every rank, `combine` of all ranks' values in rank order. Only rank 0 calls `combine`."""
        # another rank: send the value, wait for the result
        if self.rank:
            with self._lost_writer_errors(0):
                self._sockets[0].send(value)
                return self._sockets[0].receive()

        # rank 0: receive all values, then send the result
        values = [value]
        for rank, line in enumerate(self._sockets, 1):
            with self._lost_writer_errors(rank):
                values.append(line.receive())
        result = combine(values)
        for rank, line in enumerate(self._sockets, 1):
            with self._lost_writer_errors(rank):
                line.send(result)
        return result

    @contextlib.contextmanager
    def _lost_writer_errors(self, rank: int) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self.close()  # so that the other writers fail too instead of waiting
            raise OtherRankError(f"the process that writes the shard of rank {rank} has ended") from error

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """Run a block that may fail on some ranks only: if it fails anywhere, every rank raises.

        A rank whose own block fails raises its own error, the others OtherRankError with the lowest failing rank's
        message.
        """
        error: Exception | None = None
        try:
            yield
        except Exception as caught:
            error = caught
        message = None if error is None else str(error)
        first_failure = self._exchange(message, _first_failure)
        if error is not None:
            raise error
        if first_failure is not None:
            rank, text = first_failure
            raise OtherRankError(f"rank {rank}: {text}")

    def gather(self, number: int) -> list[int]:
        """Return the numbers of all ranks, in rank order, on every rank."""
        return self._exchange(number, list)

    def broadcast_from_first(self, text: str | None) -> str:
        """Return the text of the first rank, on every rank."""
        return self._exchange(text, lambda texts: texts[0])

    def close(self) -> None:
        """Close the sockets; the other writers fail at their next exchange."""
        for line in self._sockets:
            line.close()


def _first_failure(messages: list[str | None]) -> list[Any] | None:
    """Return [rank, message] of the lowest rank that has failed; None if none has. A list, as JSON has no tuples."""
    for rank, message in enumerate(messages):
        if message is not None:
            return [rank, message]
    return None


# ---------------------------------------------------------------- connecting


class FirstWriterServer:
    """The first writer's port, to which the writers of the other ranks connect."""

    def __init__(self) -> None:
        self._token = secrets.token_hex(16)  # so that only writers of this job are let in
        dual = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if dual else socket.AF_INET
        self._listener = socket.create_server(("", 0), family=family, backlog=1024, dualstack_ipv6=dual)

    @property
    def address(self) -> dict[str, Any]:
        """Everything that `connect_to_first_writer` needs, as plain JSON."""
        hosts = [socket.gethostname()]
        with contextlib.suppress(OSError):
            hosts += socket.gethostbyname_ex(hosts[0])[2]
        port = self._listener.getsockname()[1]
        return {"hosts": hosts, "port": port, "token": self._token, "machine": _machine_id()}

    def accept_all(self, ranks: int) -> WriterGroup:
        """Wait until the writers of all ranks have connected; return their group, for rank 0.

        A connection without this job's token is dropped. Raises OSError if a writer does not come in time.
        """
        sockets: dict[int, MessageSocket] = {}
        self._listener.settimeout(_CONNECT_TIMEOUT)
        while len(sockets) < ranks - 1:
            line, _ = self._listener.accept()
            line.settimeout(_CONNECT_TIMEOUT)
            other = MessageSocket(line)
            with contextlib.suppress(ConnectionError, ValueError, KeyError, TypeError):
                hello = other.receive()
                if hmac.compare_digest(hello["token"], self._token):
                    sockets[hello["rank"]] = other
                    line.settimeout(None)
        self._listener.close()
        return WriterGroup(0, [sockets[rank] for rank in range(1, ranks)])


def connect_to_first_writer(address: dict[str, Any], rank: int) -> WriterGroup:
    """Connect to the first writer at this address; return the group, for `rank`.

    Raises OSError if it is unreachable.
    """
    hosts = address["hosts"]
    if address["machine"] == _machine_id():
        hosts = ["127.0.0.1", "::1", *hosts]
    for host in hosts:
        with contextlib.suppress(OSError):
            line = socket.create_connection((host, address["port"]), timeout=_CONNECT_TIMEOUT)
            line.settimeout(None)
            first = MessageSocket(line)
            first.send({"token": address["token"], "rank": rank})
            return WriterGroup(rank, [first])
    raise OSError(
        f"the process that writes the shard of rank 0 cannot be reached at port {address['port']} of {', '.join(hosts)}"
    )


def _machine_id() -> str:
    """Return a text that only processes of this machine and network namespace share, until it is started anew."""
    with contextlib.suppress(OSError), open("/proc/sys/kernel/random/boot_id") as file:
        return f"{socket.gethostname()} {file.read().strip()} {os.stat('/proc/self/ns/net').st_ino}"
    return secrets.token_hex(8)  # unknown: equal to no other's
