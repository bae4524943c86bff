"""Last words: what is told with the exit code, however the process ends. And its end at once, without unwinding.

The threads that watch for hangs, for lost peers and for a second Ctrl-C end a process whose main thread waits in a call
that never returns.
"""

import contextlib
import os
import threading
from collections.abc import Callable
from typing import NoReturn

_SECONDS = 2.0  # for all last words of a hard exit: a file system may hang, and the process is to end
_last_words: list[Callable[[int], None]] = []


def add_last_word(tell: Callable[[int], None]) -> None:
    """Let `tell` be called once, with the exit code, when the run ends."""
    _last_words.append(tell)


def say_last_words(code: int) -> None:
    """Tell everybody who asked that the run ends with this exit code. Any thread may call; a second call tells nobody."""
    while _last_words:
        tell = _last_words.pop()
        with contextlib.suppress(Exception):  # the run ends, with or without it
            tell(code)


def hard_exit(code: int) -> NoReturn:
    """End the process with this exit code. Any thread may call."""
    if _last_words:
        teller = threading.Thread(target=say_last_words, args=(code,), daemon=True)
        teller.start()
        teller.join(_SECONDS)
    os._exit(code)
