"""A line every few seconds from work that says nothing by itself: a large model that is built, a tokenizer that is
trained. Pure."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_SECONDS = 5.0


@contextmanager
def heartbeat(
    what: str, say: Callable[[str], None], *, so_far: Callable[[], str] | None = None, every: float = _SECONDS
) -> Iterator[None]:
    """While the block runs, `say` each `every` seconds that it does: `   building the model: 15 s so far`. Nothing of a
    shorter one.

    so_far() adds how far it is. Both are called from a thread of their own.
    """
    began, ended = time.monotonic(), threading.Event()

    def beat() -> None:
        while not ended.wait(every):
            state = f", {so_far()}" if so_far is not None else ""
            say(f"   {what}: {time.monotonic() - began:.0f} s so far{state}")

    thread = threading.Thread(target=beat, name=f"heartbeat: {what}", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
