"""Ctrl-C ends a run at once, on every rank, with one line and exit code 130.

    main thread      the first SIGINT raises KeyboardInterrupt; unfinished files never have their final names
    second thread    receives each SIGINT too, even while the main thread waits inside a library (for a device or a lost
                     peer). It ends the process at the second SIGINT, or if the first has no effect for some seconds

A terminal and a launcher may both send SIGINT for one Ctrl-C: signals within a second count once.
"""

import os
import select
import signal
import threading
import time

from megatron.core.base import tolerate_broken_output
from megatron.core.base.exit_callbacks_and_hard_exit import hard_exit

CODE = 130  # exit code after SIGINT, as in shells: 128 + 2
_ONE_PRESS = 1.0  # seconds within which signals count once
_PATIENCE = 5.0  # seconds that the run has to react to the first signal


class ExitOnInterrupt:
    """Handle SIGINT within a `with` block; an uncaught KeyboardInterrupt becomes exit code 130 at the end of the block.

    Active only in the main thread, and only if Python's default handler is installed: background jobs ignore the
    signal, and a script may have its own handler. rank: named in messages.
    """

    def __init__(self, rank: int):
        self._is_interrupted = False
        self._leaving = threading.Event()
        self._rank = rank
        self._thread: threading.Thread | None = None

    def __enter__(self) -> "ExitOnInterrupt":
        is_main = threading.current_thread() is threading.main_thread()
        if not is_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
            return self
        self._read_end, self._write_end = os.pipe()  # Python writes the number of each signal to it
        os.set_blocking(self._write_end, False)
        signal.signal(signal.SIGINT, self._note)
        self._before = signal.set_wakeup_fd(self._write_end, warn_on_full_buffer=False)
        self._thread = threading.Thread(target=self._listen, name="Ctrl-C", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, kind: type | None, *error: object) -> None:
        """Restore SIGINT's handler and wakeup descriptor."""
        if self._thread is not None:
            signal.set_wakeup_fd(self._before)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            os.close(self._write_end)  # ends the thread
            self._thread.join()
            os.close(self._read_end)
            self._thread = None
        if kind is not None and issubclass(kind, KeyboardInterrupt):
            raise SystemExit(CODE) from None

    def _note(self, number: int, frame: object) -> None:
        first = not self._is_interrupted
        self._is_interrupted = True
        if first and not self._leaving.is_set():
            raise KeyboardInterrupt

    def is_reason_of(self, error: BaseException) -> bool:
        """Whether `error` follows from a SIGINT. After this call SIGINT raises nothing."""
        self._leaving.set()
        return self._is_interrupted or isinstance(error, KeyboardInterrupt)

    def _listen(self) -> None:
        """Read signal numbers, one byte each, until the pipe is closed."""
        first = None  # the time of the first SIGINT
        while True:
            # after the first SIGINT the run has some seconds to react
            timeout = None
            if first is not None and not self._leaving.is_set():
                timeout = max(0.0, first + _PATIENCE - time.monotonic())
            readable, _, _ = select.select([self._read_end], [], [], timeout)
            if not readable:
                if not self._leaving.is_set():
                    self._end("the run did not end by itself")
                continue
            numbers = os.read(self._read_end, 64)
            if not numbers:
                return
            if signal.SIGINT in numbers:
                first = first or time.monotonic()
                if time.monotonic() - first > _ONE_PRESS:
                    self._end("once more")

    def _end(self, why: str) -> None:
        tolerate_broken_output.write_to_stderr_or_stdout(f"rank {self._rank}: interrupted, {why}: ended at once\n")
        hard_exit(CODE)


def farewell(iteration: int | None, how_to_resume: str) -> str:
    """Return the last message of an interrupted run. iteration: steps done; None before training."""
    where = "before the first step" if not iteration else f"after iteration {iteration}"
    return f"interrupted {where}; {how_to_resume}"
