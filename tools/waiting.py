"""Say what a tool waits for when it reads a pipe or standard input and nothing comes."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from megatron.training.monitor.long_task_progress import heartbeat

STDIN = "-"  # as the path of a file
_SECONDS = 5.0


def is_stream(path: str) -> bool:
    """Return whether `path` is standard input or a pipe (as in <(command)): readable once, of unknown length."""
    return path == STDIN or (os.path.exists(path) and not os.path.isfile(path) and not os.path.isdir(path))


@contextmanager
def waiting_for_text(path: str) -> Iterator[None]:
    """Print a line to stderr every few seconds while the block opens, or reads the first text of, a stream.

    A pipe is opened when another program opens it for writing. For a file nothing is printed.
    """
    if not is_stream(path):
        yield
        return
    name = "standard input" if path == STDIN else f"the pipe {path}, which no program has opened to write"
    with heartbeat(f"waiting for text from {name}", _say, every=_SECONDS):
        yield


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
