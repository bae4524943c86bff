"""What memory is used for, said where it is allocated. Who counts memory asks `current_memory_kind`. Without torch.

    with memory_kind("communication"):          what this thread allocates inside is of this kind; @memory_kind(...) on
    functions
        parts = torch.empty_like(x)
    set_memory_kind("activations", received)     memory that is there changes its kind

Kinds: communication, gradients, activations, slices (of state in a file, on the host), other (temporary memory of an
update or
a report). The innermost block decides; outside of all blocks memory is that of activations. A backward may run in another
thread than its forward, so a backward that needs a kind says so itself.
"""

import threading
from collections.abc import Callable, Iterable
from contextlib import ContextDecorator
from typing import Any

ACTIVATIONS = "activations"


class _Kinds(threading.local):
    def __init__(self) -> None:
        self.entered: list[str] = []


_kinds = _Kinds()
listeners: list[Callable[[str, Iterable[Any]], None]] = []  # called by `set_memory_kind`


class memory_kind(ContextDecorator):
    """Inside the block, or the decorated function, this thread allocates memory of `kind`."""

    def __init__(self, kind: str):
        self.kind = kind

    def __enter__(self) -> None:
        _kinds.entered.append(self.kind)

    def __exit__(self, *exception: object) -> None:
        _kinds.entered.pop()


def current_memory_kind() -> str:
    """The kind of what this thread allocates now."""
    entered = _kinds.entered
    return entered[-1] if entered else ACTIVATIONS


def set_memory_kind(kind: str, tensors: Iterable[Any]) -> None:
    """The memory of these tensors is of this kind from here on."""
    for listener in listeners:
        listener(kind, tensors)
