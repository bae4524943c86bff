"""Freeing and reallocating a tensor's memory in place, while the tensor stays.

torch dispatches no operator for this, so code that counts memory registers a listener here.
"""

from collections.abc import Callable

from torch import UntypedStorage

listeners: list[Callable[[UntypedStorage], None]] = []


def resize_and_notify(storage: UntypedStorage, nbytes: int) -> None:
    """Change a storage's size in place; its contents are undefined afterwards."""
    storage.resize_(nbytes)
    for listener in listeners:
        listener(storage)
