"""What has been started and is not done yet: a collective, a transfer between stages, a read, a write, a copy. Without torch."""

from collections.abc import Callable, Iterable
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class Pending(Generic[T]):
    """`wait()` gives the result, the same one however often it is called.

    finish: waits, once, and gives the result. keep: what must stay alive until then; the tensors may not be touched before.
    """

    def __init__(self, finish: Callable[[], T], *keep: Any):
        self._finish: Callable[[], T] | None = finish
        self._keep = keep

    def wait(self) -> T:
        if self._finish is not None:
            self._result = self._finish()
            self._finish, self._keep = None, ()
        return self._result


def done(result: T = None) -> Pending[T]:
    """What needs no waiting."""
    return Pending(lambda: result, result)


def all_of(started: Iterable[Pending[T]]) -> Pending[tuple[T, ...]]:
    """Several as one, waited for in their order."""
    started = tuple(started)
    return Pending(lambda: tuple(one.wait() for one in started), *started)
