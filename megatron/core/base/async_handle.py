"""The handle of an asynchronous operation: a collective, a transfer between stages, a read, a write, a copy. Without
torch."""

from collections.abc import Callable, Iterable
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class Pending(Generic[T]):
    """An operation in flight. `wait()` blocks until it is done and returns its result; later calls return the same result.

    finish: called once; waits and returns the result. keep: objects kept alive until then. Tensors of the operation must not
    be read or written before `wait()`.
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
    """A Pending that is complete."""
    return Pending(lambda: result, result)


def all_of(started: Iterable[Pending[T]]) -> Pending[tuple[T, ...]]:
    """One Pending for several; waits in their order."""
    started = tuple(started)
    return Pending(lambda: tuple(one.wait() for one in started), *started)
