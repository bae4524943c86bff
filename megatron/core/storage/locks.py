"""Locks on files and folders that end with the process that holds them, however it ends: the system gives them back."""

import fcntl
from typing import BinaryIO


def locked(file: int | BinaryIO) -> bool:
    """Lock the open file or folder for this process, until it is closed. False where another process holds the lock.

    Raises OSError on a file system without locks.
    """
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
