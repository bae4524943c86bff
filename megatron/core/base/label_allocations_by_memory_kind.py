"""Memory is labelled with what it is used for, in the code that allocates it. No torch.

    with memory_kind("communication"):           memory that this thread allocates inside is of this kind;
        parts = torch.empty_like(x)              @memory_kind(...) does the same for a function
    set_memory_kind("activations", received)     these tensors are of this kind from now on

Kinds: communication, gradients, activations, slices (of state in a file, on the host), other (temporary memory of an
update or a report). The innermost block decides; outside of all blocks memory is that of activations. A backward may
run in another thread than its forward, so a backward that needs a kind sets it itself. The prediction of memory reads
the labels by `current_memory_kind` and `listeners`.
"""

import functools
import threading
from collections.abc import Callable, Iterable
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

ACTIVATIONS = "activations"


class _Kinds(threading.local):
    def __init__(self) -> None:
        self.entered: list[str] = []


_kinds = _Kinds()
listeners: list[Callable[[str, Iterable[Any]], None]] = []  # called by `set_memory_kind`


class memory_kind:
    """A block, or a decorated function, in which this thread allocates memory of `kind`."""

    def __init__(self, kind: str):
        self.kind = kind

    def __enter__(self) -> None:
        _kinds.entered.append(self.kind)

    def __exit__(self, *exception: object) -> None:
        _kinds.entered.pop()

    def __call__(self, function: Callable[P, R]) -> Callable[P, R]:
        # Written out, since some decorated functions run for every parameter of every step: half the time of a
        # `contextlib.ContextDecorator`, which makes a block a call.
        kind = self.kind

        @functools.wraps(function)
        def labelled(*args: P.args, **kwargs: P.kwargs) -> R:
            entered = _kinds.entered
            entered.append(kind)
            try:
                return function(*args, **kwargs)
            finally:
                entered.pop()

        return labelled


def current_memory_kind() -> str:
    """Return the kind of the memory that this thread allocates now."""
    entered = _kinds.entered
    return entered[-1] if entered else ACTIVATIONS


def set_memory_kind(kind: str, tensors: Iterable[Any]) -> None:
    """Label the memory of these tensors, of any shapes, with this kind from now on."""
    for listener in listeners:
        listener(kind, tensors)
