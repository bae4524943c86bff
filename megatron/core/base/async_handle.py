"""The handle of an asynchronous operation: a collective, a transfer between stages, a read, a write, a copy.

No torch.
"""

from collections.abc import Callable, Iterable
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class AsyncHandle(Generic[T]):
    """An operation in flight.

    `wait()` blocks until it is done and returns its result; later calls return the same result, which the handle
    keeps alive.

    finish: called once; waits and returns the result. keep: objects kept alive until then. Tensors of the operation
    must not be read or written before `wait()`.
    """

    def __init__(self, finish: Callable[[], T], *keep: Any):
        self._finish: Callable[[], T] | None = finish
        self._keep = keep

    def wait(self) -> T:
        if self._finish is not None:
            self._result = self._finish()
            self._finish = None
            self._keep = ()
        return self._result


def done(result: T = None) -> AsyncHandle[T]:
    """Return the handle of an operation that is complete."""
    return AsyncHandle(lambda: result, result)


def all_of(handles: Iterable[AsyncHandle[T]]) -> AsyncHandle[tuple[T, ...]]:
    """Return one handle for several, which are waited for in their order."""
    handles = tuple(handles)  # starts all operations, if `handles` is a generator
    return AsyncHandle(lambda: tuple(handle.wait() for handle in handles), *handles)
