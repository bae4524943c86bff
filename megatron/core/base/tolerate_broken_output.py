"""A process keeps running when one of its outputs cannot be written any more, and reports that on the others. Pure.

    keep_running(rank)    from now on a write to standard output or standard error raises nothing
    until_reader_ends(f)  for a tool, whose standard output is its answer: it ends when nobody reads the answer any more
    print_stderr(text)    print on standard error, for threads and exits that must continue even if the text is lost
    report_lost_output(output, why)     of any other output: report it once, and record it in `losses`

The kind of a standard stream decides what follows a failed write:

    a pipe, a terminal, nothing    its reader is gone for good: the descriptor leads to /dev/null from now on, so that
                                   neither libraries in C nor child processes meet the error again
    a file                         the disk may have space again: each write is tried, and the first that works says how
                                   many bytes are missing before it

A failed write is reported by a bare system call on the other stream: this thread holds the failed stream's lock, and a
thread that fails on the other stream at the same moment holds that one's.
"""

import contextlib
import io
import os
import select
import signal
import stat
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

_HANDLES = {"stdout": 1, "stderr": 2}
_NAMES = {"stdout": "standard output", "stderr": "standard error"}


class Loss(NamedTuple):
    """An output that failed. why: the system's reason."""

    output: str
    why: str

    def __str__(self) -> str:
        return f"{self.output} cannot be written ({self.why}); the run goes on without it"


losses: list[Loss] = []  # of this process, in order; each output once
_streams: dict[str, "StandardStream"] = {}  # stdout and stderr, once `keep_running` has taken them
_rank = 0


class StandardStream(io.RawIOBase):
    """The descriptor of standard output or standard error, whose writes never fail unless that is asked for."""

    def __init__(self, name: str, handle: int, *, is_closed: bool = False, raises: bool = False):
        """raises: a failed write raises its error, once; from then on the descriptor leads to /dev/null."""
        super().__init__()
        self.raises = raises
        self.failure: OSError | None = None  # the error that was raised
        self.name = f"<{name}>"
        self._output = _NAMES[name]  # in messages
        self._handle = handle
        self._is_gone = is_closed
        self._missing = 0  # bytes lost since the last write that worked
        self._why = ""
        self._in_line = False  # whether the file ends in the middle of a line

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._handle

    def isatty(self) -> bool:
        return not self._is_gone and os.isatty(self._handle)

    def write(self, data: Any) -> int:
        """Write all of `data`, or lose it."""
        content = bytes(data)
        if self._is_gone:
            return len(content)
        try:
            self._report_missing_bytes()
        except OSError as error:
            self._fail(error, len(content))
            return len(content)
        left = memoryview(content)
        try:
            while left:
                left = left[self._write_some(left) :]
        except OSError as error:
            self._fail(error, len(left))
        return len(content)

    @property
    def is_gone(self) -> bool:
        """Whether the last write was lost, or all writes are."""
        return self._is_gone or self._missing > 0

    def _write_some(self, data: memoryview) -> int:
        """Write once; wait if another program has made the descriptor non-blocking. Return the bytes written."""
        while True:
            try:
                written = os.write(self._handle, data)
            except BlockingIOError:
                select.select([], [self._handle], [])
                continue
            self._in_line = data[written - 1] != ord("\n")
            return written

    def _report_missing_bytes(self) -> None:
        if not self._missing:
            return
        start = "\n" if self._in_line else ""
        left = memoryview(f"{start}[{self._missing} bytes are missing here: {self._why}]\n".encode())
        while left:
            left = left[self._write_some(left) :]
        self._missing = 0

    def _fail(self, error: OSError, lost: int) -> None:
        if self.raises:
            self.failure = error
            self._is_gone = True
            _lead_nowhere(self._handle)
            raise error
        self._missing += lost
        self._why = error.strerror or str(error)
        if not _is_file(self._handle):
            self._is_gone = True
            _lead_nowhere(self._handle)
        report_lost_output(self._output, self._why)


def _is_file(handle: int) -> bool:
    try:
        return stat.S_ISREG(os.fstat(handle).st_mode)
    except OSError:  # closed
        return False


def _lead_nowhere(handle: int) -> None:
    """Make a descriptor lead to /dev/null."""
    with contextlib.suppress(OSError):  # no descriptor is left for /dev/null
        null = os.open(os.devnull, os.O_RDWR)
        if null != handle:
            os.dup2(null, handle)
            os.close(null)
        os.set_inheritable(handle, True)


def keep_running(rank: int = 0, *, answers: bool = False) -> None:
    """Let neither standard stream end this process from now on. A stream that a script or a test has replaced stays.

    rank: named in messages. A second call changes only that. answers: on standard output, a failed write still raises.
    A stream that was closed at the start (`>&-`) leads to /dev/null from now on: a checkpoint would be the next file to
    get its descriptor, and libraries in C write there.
    """
    global _rank
    _rank = rank
    for name, handle in _HANDLES.items():
        stream = getattr(sys, name)
        if stream is None:
            if not _is_open(handle):
                _lead_nowhere(handle)
            _streams[name] = StandardStream(name, handle, is_closed=True)
            text = _as_text(_streams[name], "utf-8", "backslashreplace", line_buffering=True)
        elif name not in _streams and isinstance(stream, io.TextIOWrapper) and stream is getattr(sys, f"__{name}__"):
            _streams[name] = StandardStream(name, handle, raises=answers and name == "stdout")
            with contextlib.suppress(OSError, ValueError):  # the new stream meets the same error
                stream.flush()
            # A letter that the encoding lacks ends no run either: it is escaped, as Python does on standard error.
            errors = "backslashreplace" if stream.errors == "strict" else stream.errors
            as_before = {"line_buffering": stream.line_buffering, "write_through": stream.write_through}
            text = _as_text(_streams[name], stream.encoding, errors, **as_before)
        else:
            continue
        setattr(sys, name, text)


def _as_text(stream: StandardStream, encoding: str, errors: str | None, **buffering: bool) -> io.TextIOWrapper:
    """Return a text stream over a raw one, built as Python builds its own: without a buffer after -u or PYTHONUNBUFFERED."""
    is_unbuffered = buffering.get("write_through", False)
    buffer = stream if is_unbuffered else io.BufferedWriter(stream)
    return io.TextIOWrapper(buffer, encoding, errors, **buffering)  # type: ignore[arg-type]


def _is_open(handle: int) -> bool:
    try:
        os.fstat(handle)
    except OSError:
        return False
    return True


def report_lost_output(output: str, why: object) -> None:
    """Report once that an output has failed, on a standard stream that can be written.

    Any thread may call, and a signal handler. why: an OSError, or a text.
    """
    if any(loss.output == output for loss in losses):
        return
    reason = why.strerror if isinstance(why, OSError) else None
    loss = Loss(output, reason or str(why))
    losses.append(loss)
    write_to_stderr_or_stdout(f"WARNING: rank {_rank}: {loss}\n")


def write_to_stderr_or_stdout(text: str) -> None:
    """Write on standard error, or if that is lost on standard output.

    It is a system call, since a signal may have interrupted a print in the middle of its line.
    """
    for name in ("stderr", "stdout"):
        stream = _streams.get(name)
        if stream is not None and stream.raises:
            return  # it holds a tool's answers
        if stream is None:
            with contextlib.suppress(OSError, ValueError, AttributeError):  # taken by a script or a test, or closed
                print(text, end="", file=getattr(sys, name), flush=True)
                return
        elif not stream.is_gone:
            stream.write(text.encode())
            if not stream.is_gone:
                return


def print_stderr(text: str) -> None:
    """Print on standard error, if it can be written; no error if it cannot."""
    if sys.stderr is None:  # print would take standard output instead
        return
    with contextlib.suppress(OSError, ValueError):
        print(text, file=sys.stderr, flush=True)


def flush() -> None:
    """Flush both standard streams, as far as they can be written."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()


# ---------------------------------------------------------------- answers on standard output

READER_ENDED = 128 + signal.SIGPIPE  # the exit code that shells give a program which SIGPIPE has ended


def until_reader_ends(work: Callable[[], int | None]) -> int | None:
    """Do the `work` of a tool and return its exit status.

    If the reader of standard output ends first, as with `| head`, the status is `READER_ENDED`, without a message; if
    standard output cannot be written for another reason, it is 1, with a message. A lost standard error ends no tool.
    """
    keep_running(answers=True)
    try:
        try:
            status = work()
        except SystemExit as end:  # of --help
            _flush_answers()
            stream = _streams.get("stdout")
            if stream is not None and stream.failure is not None and not end.code:
                raise stream.failure from None  # argparse passes over the error of a write
            raise
        _flush_answers()
        return status
    except OSError as error:
        if not answers_failed():
            raise
        return _status_after(error)


def _status_after(error: OSError) -> int:
    """Return the exit status of a process whose answer cannot be written; print why, unless its reader just ended."""
    if isinstance(error, BrokenPipeError):
        return READER_ENDED
    print_stderr(f"standard output cannot be written: {error.strerror}")
    return 1


def _flush_answers() -> None:
    if sys.stdout is not None:
        sys.stdout.flush()


def answers_failed() -> bool:
    """Return whether an OSError that was raised is, or follows from, that of standard output."""
    stream = _streams.get("stdout")
    return stream is not None and stream.failure is not None


def print_answer(text: str) -> None:
    """Print the answer of a tool, such as its help; end the process without a message if the reader ends first."""
    stream = _streams.get("stdout")
    before = stream is not None and stream.raises
    try:
        if stream is not None:
            stream.raises = True
        print(text, end="", flush=True)
    except OSError as error:
        raise SystemExit(_status_after(error)) from None
    finally:
        if stream is not None:
            stream.raises = before
