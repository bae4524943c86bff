"""A time limit for work that may never end."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


def in_time(work: Callable[[], T], seconds: float) -> T:
    """Return the result of `work`, or raise its exception; raise TimeoutError after `seconds`.

    The work runs in a daemon thread (0.1 ms to start), because library code cannot be interrupted; it must release the
    GIL. After a timeout it continues in its thread.
    """
    result: Future[T] = Future()

    def run() -> None:
        try:
            result.set_result(work())
        except BaseException as error:
            result.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return result.result(seconds)
