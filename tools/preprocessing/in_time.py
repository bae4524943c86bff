"""A time limit for work that may never end."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


def in_time(work: Callable[[], T], seconds: float) -> T:
    """The result or exception of `work`. Raises TimeoutError after `seconds`; the work then continues in its thread.

    Work runs in a daemon thread (0.1 ms to start), because library code cannot be interrupted; it must release the GIL.
    """
    done: Future[T] = Future()

    def run() -> None:
        try:
            done.set_result(work())
        except BaseException as error:
            done.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return done.result(seconds)
