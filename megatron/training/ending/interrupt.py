"""Ctrl-C: a run ends where it is, on every rank, with one line and exit code 130.

    main thread    the first SIGINT raises KeyboardInterrupt where the run is; what is half done is never under a final name
    a thread       hears each SIGINT too, also while the main thread waits in a library that runs no Python (for a peer that has
                   gone, for a device): a second one, or a first that has led nowhere for some seconds, ends the process at once

A terminal and a launcher may both send the signal for one Ctrl-C, so signals within a second count as one.
"""

import os
import select
import signal
import threading
import time

CODE = 130  # of a process that SIGINT has ended, as shells count: 128 + 2
_ONE_PRESS = 1.0  # seconds
_PATIENCE = 5.0  # seconds from the first signal until the run has begun to leave


class Interrupt:
    """Listens for SIGINT within a `with` block; a KeyboardInterrupt that nobody has seen to ends the process at the block's end.

    Only in the main thread, and only where Python's own handler is in place: a shell's background job ignores the signal, and a
    script may have a handler of its own. rank: who speaks.
    """

    def __init__(self, rank: int):
        self._heard, self._leaving = False, threading.Event()
        self._rank = rank
        self._thread: threading.Thread | None = None

    def __enter__(self) -> "Interrupt":
        is_main = threading.current_thread() is threading.main_thread()
        if not is_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
            return self
        self._ear, self._mouth = os.pipe()
        os.set_blocking(self._mouth, False)
        signal.signal(signal.SIGINT, self._note)
        self._before = signal.set_wakeup_fd(self._mouth, warn_on_full_buffer=False)
        self._thread = threading.Thread(target=self._listen, name="Ctrl-C", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, kind: type | None, *error: object) -> None:
        """Leave SIGINT as it was found."""
        if self._thread is not None:
            signal.set_wakeup_fd(self._before)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            os.close(self._mouth)  # which the thread takes for the end
            self._thread.join()
            os.close(self._ear)
            self._thread = None
        if kind is not None and issubclass(kind, KeyboardInterrupt):
            raise SystemExit(CODE) from None

    def _note(self, number: int, frame: object) -> None:
        first, self._heard = not self._heard, True
        if first and not self._leaving.is_set():
            raise KeyboardInterrupt

    def is_reason_of(self, error: BaseException) -> bool:
        """Whether the run ends because of a signal, whatever error that has become. From now on none raises anything."""
        self._leaving.set()
        return self._heard or isinstance(error, KeyboardInterrupt)

    def _listen(self) -> None:
        """Of the thread: numbers of signals come in, one byte each."""
        first = None
        while True:
            left = None if first is None or self._leaving.is_set() else max(0.0, first + _PATIENCE - time.monotonic())
            if not select.select([self._ear], [], [], left)[0]:
                if not self._leaving.is_set():
                    self._end("the run did not end by itself")
                continue
            numbers = os.read(self._ear, 64)
            if not numbers:
                return
            if signal.SIGINT in numbers:
                first = first or time.monotonic()
                if time.monotonic() - first > _ONE_PRESS:
                    self._end("once more")

    def _end(self, why: str) -> None:
        os.write(2, f"rank {self._rank}: interrupted, {why}: ended at once\n".encode())
        os._exit(CODE)


def farewell(iteration: int | None, where_to_go_on: str) -> str:
    """What an interrupted run says. iteration: steps it has made, None before training."""
    where = "before the first step" if not iteration else f"after iteration {iteration}"
    return f"interrupted {where}; {where_to_go_on}"
