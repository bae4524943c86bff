"""Reading an object store ahead: several requests are in flight while the bytes read before are hashed. No torch.

A request waits tens of milliseconds for its first byte, and one connection carries only a part of the network's
bandwidth. So adjacent spans of an object are requested together, long ones in parts, and the next requests are made
before the first has been answered.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

REQUEST_BYTES = 8 << 20  # bytes of a request, at most
UNDER_WAY = 8  # requests in flight; with the part that is being read they take at most 72 MiB


class FileSpan(NamedTuple):
    """Bytes start:stop of a file, which are read in order."""

    path: Path
    start: int
    stop: int


def requests_of(spans: Iterable[FileSpan]) -> Iterator[FileSpan]:
    """Yield the spans in their order: adjacent ones joined, then cut into parts of at most `REQUEST_BYTES` bytes."""
    joined: FileSpan | None = None
    for span in spans:
        if joined is not None and (joined.path, joined.stop) == (span.path, span.start):
            joined = joined._replace(stop=span.stop)
            continue
        yield from _parts_of(joined)
        joined = span
    yield from _parts_of(joined)


def _parts_of(span: FileSpan | None) -> Iterator[FileSpan]:
    if span is None:
        return
    for start in range(span.start, span.stop, REQUEST_BYTES):
        yield FileSpan(span.path, start, min(start + REQUEST_BYTES, span.stop))


class ReadAhead:
    """The bytes of `spans`, which must be taken in this order.

    Its context cancels the requests that are not needed any more.

    open: takes a path, returns an object whose `fetch(start, stop)` returns bytes, fewer if the object ends before. Any
    thread may call it.
    """

    def __init__(self, spans: Iterable[FileSpan], open: Callable[[Path], Any]):
        self._requests = requests_of(spans)
        self._open = open
        self._pool = ThreadPoolExecutor(UNDER_WAY, thread_name_prefix="reads ahead")
        self._in_flight: deque[tuple[FileSpan, Future[bytes]]] = deque()
        # the answered request from which bytes are taken
        self._span = FileSpan(Path(), 0, 0)
        self._data = memoryview(b"")

    def take(self, path: Path, position: int) -> memoryview:
        """Return bytes of an object from `position` on, as many as have been read; empty if it ends there.

        Waits for a request if none of these bytes have been read. Raises OSError.
        """
        while not (self._span.path == path and self._span.start <= position < self._span.stop):
            self._start_requests()
            if not self._in_flight:
                return memoryview(b"")
            self._span, answer = self._in_flight.popleft()
            self._data = memoryview(b"")  # free the old bytes before the next are here
            self._data = memoryview(answer.result())
        return self._data[position - self._span.start :]

    def _start_requests(self) -> None:
        while len(self._in_flight) < UNDER_WAY:
            request = next(self._requests, None)
            if request is None:
                return
            future = self._pool.submit(self._open(request.path).fetch, request.start, request.stop)
            self._in_flight.append((request, future))

    def __enter__(self) -> "ReadAhead":
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)
