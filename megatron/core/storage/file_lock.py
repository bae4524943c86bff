"""Locks on files and folders. The system releases them when the process ends, even if it is killed."""

import fcntl
from typing import BinaryIO


def locked(file: int | BinaryIO) -> bool:
    """Lock an open file or folder until it is closed; return False, without waiting, if another process holds the lock.

    Raises OSError on a file system without locks.
    """
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
