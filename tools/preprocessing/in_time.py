"""Work that may never end, given up after a time."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


def in_time(work: Callable[[], T], seconds: float) -> T:
    """The result of `work`, or what it raises. Raises TimeoutError after `seconds`; the work is then left to itself.

    It runs in a thread of its own, for code of a library cannot be interrupted; such code must let other threads run.
    The thread ends with the process at the latest. Making it takes 0.1 ms.
    """
    done: Future[T] = Future()

    def run() -> None:
        try:
            done.set_result(work())
        except BaseException as error:
            done.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return done.result(seconds)
