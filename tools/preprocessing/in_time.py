"""Work that may never end, given up after a time."""

import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def in_time(work: Callable[[], T], seconds: float) -> T:
    """The result of `work`, or what it raises. Raises TimeoutError after `seconds`; the work is then left to itself.

    It runs in a thread of its own, for code of a library cannot be interrupted; such code must let other threads run.
    The thread ends with the process at the latest. Making it takes 0.1 ms.
    """
    results: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(work())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    if errors:
        raise errors[0]
    if not results:
        raise TimeoutError
    return results[0]
