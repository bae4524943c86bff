"""How the processes that write checkpoints talk: to their rank, and to one another around the first. Sockets, no torch.

            writer 1
               |                 each writer sends the first what it has to say, the first sends all what follows from it
    writer 2 - writer 0 - ...    one exchange for each step of a save (`Star`, an `Agreement` of write_and_publish.py)

Training's collectives go on meanwhile: the two never share a group. A writer that ends closes its sockets, and all others
fail at their next exchange.
"""

import contextlib
import hmac
import json
import os
import secrets
import socket
from collections.abc import Callable, Iterator
from typing import Any

_HEAD = 8  # bytes: the length of a message
_ANSWERS_WITHIN = 30.0  # seconds for the writers of a job to connect


class OtherRankError(RuntimeError):
    """Another rank's part of a save has failed; the message is its own."""


class Messages:
    """One end of a socket: JSON messages, and handles of open files with them."""

    def __init__(self, line: socket.socket):
        self.line = line
        self.handles: list[int] = []  # that have come with messages; the reader closes them

    def send(self, message: Any, *handles: int) -> None:
        data = json.dumps(message).encode()
        socket.send_fds(self.line, [len(data).to_bytes(_HEAD, "little")], handles)
        self.line.sendall(data)

    def receive(self) -> Any:
        """Waits for the next message. Raises ConnectionError if the other end is gone."""
        try:
            head, handles = socket.recv_fds(self.line, _HEAD, 1)[:2]
            self.handles += handles
            head += self._bytes(_HEAD - len(head))
            return json.loads(self._bytes(int.from_bytes(head, "little")))
        except OSError as error:
            raise ConnectionError(str(error)) from error

    def _bytes(self, count: int) -> bytes:
        data = bytearray()
        while len(data) < count:
            if not (some := self.line.recv(min(count - len(data), 1 << 20))):
                raise ConnectionError("the other end is gone")
            data += some
        return bytes(data)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self.line.shutdown(socket.SHUT_RDWR)
        self.line.close()


class Star:
    """The agreement of the writers of all ranks. lines: at the first those to ranks 1, 2, ..., elsewhere that to the
    first."""

    def __init__(self, rank: int, lines: list[Messages]):
        self.rank, self._lines = rank, lines

    def _meet(self, mine: Any, combine: Callable[[list[Any]], Any]) -> Any:
        """`combine` of what all ranks say, in their order."""
        if self.rank:
            with self._noticing(0):
                self._lines[0].send(mine)
                return self._lines[0].receive()
        told = [mine]
        for rank, line in enumerate(self._lines, 1):
            with self._noticing(rank):
                told.append(line.receive())
        result = combine(told)
        for rank, line in enumerate(self._lines, 1):
            with self._noticing(rank):
                line.send(result)
        return result

    @contextlib.contextmanager
    def _noticing(self, rank: int) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self.close()  # by which the others notice
            raise OtherRankError(f"the process that writes the part of rank {rank} has ended") from error

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        error: Exception | None = None
        try:
            yield
        except Exception as caught:
            error = caught
        told = None if error is None else str(error)
        failed = self._meet(
            told, lambda told: next(([rank, text] for rank, text in enumerate(told) if text is not None), None)
        )
        if error is not None:
            raise error
        if failed is not None:
            raise OtherRankError(f"rank {failed[0]}: {failed[1]}")

    def gather(self, number: int) -> list[int]:
        return self._meet(number, list)

    def first_says(self, text: str | None) -> str:
        return self._meet(text, lambda told: told[0])

    def close(self) -> None:
        for line in self._lines:
            line.close()


# ---------------------------------------------------------------- meeting


class Middle:
    """The first writer's port, to which those of the other ranks connect."""

    def __init__(self) -> None:
        self._token = secrets.token_hex(16)
        dual = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if dual else socket.AF_INET
        self._listener = socket.create_server(("", 0), family=family, backlog=1024, dualstack_ipv6=dual)

    @property
    def address(self) -> dict[str, Any]:
        """What a writer connects to."""
        hosts = [socket.gethostname()]
        with contextlib.suppress(OSError):
            hosts += socket.gethostbyname_ex(hosts[0])[2]
        return {"hosts": hosts, "port": self._listener.getsockname()[1], "token": self._token, "machine": _machine()}

    def meet(self, ranks: int) -> Star:
        """Waits until the writers of all ranks have connected; strangers are hung up on."""
        came: dict[int, Messages] = {}
        self._listener.settimeout(_ANSWERS_WITHIN)
        while len(came) < ranks - 1:
            line, _ = self._listener.accept()
            line.settimeout(_ANSWERS_WITHIN)
            other = Messages(line)
            with contextlib.suppress(ConnectionError, ValueError, KeyError, TypeError):
                hello = other.receive()
                if hmac.compare_digest(hello["token"], self._token):
                    came[hello["rank"]] = other
                    line.settimeout(None)
        self._listener.close()
        return Star(0, [came[rank] for rank in range(1, ranks)])


def join(address: dict[str, Any], rank: int) -> Star:
    """The star of the first writer at this address. Raises OSError if it cannot be reached."""
    hosts = ["127.0.0.1", "::1"] * (address["machine"] == _machine()) + address["hosts"]
    for host in hosts:
        with contextlib.suppress(OSError):
            line = socket.create_connection((host, address["port"]), timeout=_ANSWERS_WITHIN)
            line.settimeout(None)
            first = Messages(line)
            first.send({"token": address["token"], "rank": rank})
            return Star(rank, [first])
    raise OSError(
        f"the process that writes rank 0's part cannot be reached at port {address['port']} of {', '.join(hosts)}"
    )


def _machine() -> str:
    """The same for the processes of one machine since it started."""
    with contextlib.suppress(OSError), open("/proc/sys/kernel/random/boot_id") as file:
        return f"{socket.gethostname()} {file.read().strip()} {os.stat('/proc/self/ns/net').st_ino}"
    return secrets.token_hex(8)
