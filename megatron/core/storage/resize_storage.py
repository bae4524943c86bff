"""Memory that is given back and taken again while its tensor stays. No operator tells of it: who counts memory
listens here."""

from collections.abc import Callable

from torch import UntypedStorage

listeners: list[Callable[[UntypedStorage], None]] = []


def resize(storage: UntypedStorage, nbytes: int) -> None:
    """Change a storage's size in place; its contents are undefined afterwards."""
    storage.resize_(nbytes)
    for tell in listeners:
        tell(storage)
