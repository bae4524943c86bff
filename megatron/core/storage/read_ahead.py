"""Reading an object store ahead: several requests are under way while what came before is hashed. No torch.

A request waits tens of milliseconds for its first byte, and one connection carries a part of what the network does. So spans
that touch in an object are asked for together, long ones in parts, and the next requests are made before the first has come.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

REQUEST_BYTES = 8 << 20  # bytes of a request, at most
UNDER_WAY = 8  # requests under way; with the part that is being read they take at most 72 MiB


class FileSpan(NamedTuple):
    """Bytes of a file that are read in their order."""

    path: Path
    start: int
    stop: int


def requests_of(spans: Iterable[FileSpan]) -> Iterator[FileSpan]:
    """The spans in their order: those that touch as one, and that in parts of at most `REQUEST_BYTES` bytes."""
    together: FileSpan | None = None
    for span in spans:
        if together is not None and (together.path, together.stop) == (span.path, span.start):
            together = together._replace(stop=span.stop)
            continue
        yield from _parts_of(together)
        together = span
    yield from _parts_of(together)


def _parts_of(span: FileSpan | None) -> Iterator[FileSpan]:
    if span is not None:
        for at in range(span.start, span.stop, REQUEST_BYTES):
            yield FileSpan(span.path, at, min(at + REQUEST_BYTES, span.stop))


class ReadAhead:
    """The bytes of `spans`, which are taken in this order. As a context it ends with what is still under way.

    open: of a path, an object whose `fetch(start, stop)` returns bytes, fewer where the object ends. Any thread may call it.
    """

    def __init__(self, spans: Iterable[FileSpan], open: Callable[[Path], Any]):
        self._requests, self._open = requests_of(spans), open
        self._pool = ThreadPoolExecutor(UNDER_WAY, thread_name_prefix="reads ahead")
        self._under_way: deque[tuple[FileSpan, Future[bytes]]] = deque()
        self._held, self._data = FileSpan(Path(), 0, 0), memoryview(b"")

    def take(self, path: Path, at: int) -> memoryview:
        """The bytes of an object from `at` on that are here, waiting for some; empty where it ends. Raises OSError."""
        while not (self._held.path == path and self._held.start <= at < self._held.stop):
            self._begin()
            if not self._under_way:
                return memoryview(b"")
            self._held, coming = self._under_way.popleft()
            self._data = memoryview(b"")  # before the next is here, not after
            self._data = memoryview(coming.result())
        return self._data[at - self._held.start :]

    def _begin(self) -> None:
        while len(self._under_way) < UNDER_WAY and (request := next(self._requests, None)) is not None:
            self._under_way.append((request, self._pool.submit(self._open(request.path).fetch, *request[1:])))

    def __enter__(self) -> "ReadAhead":
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)
