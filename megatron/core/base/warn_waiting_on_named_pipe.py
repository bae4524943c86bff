"""A named pipe that nobody writes is waited for, and after some seconds a line says so. Pure."""

import os
import stat
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from megatron.core.base.tolerate_broken_output import print_stderr

SECONDS = 5.0


@contextmanager
def told_if_nobody_writes(path: str, flag: str) -> Iterator[None]:
    """Say once, on the first rank, if reading `path`, the file of `flag`, takes `SECONDS` because it is a named pipe."""
    try:
        is_pipe = stat.S_ISFIFO(os.stat(path).st_mode)
    except (OSError, ValueError):  # whoever opens it says why
        is_pipe = False
    if not is_pipe or os.environ.get("RANK", "0") != "0":
        yield
        return
    text = f"{flag} {path} is a named pipe: waiting for a program that writes it and closes it"
    timer = threading.Timer(SECONDS, print_stderr, [text])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
