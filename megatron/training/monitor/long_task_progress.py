"""A progress line is printed every few seconds of long silent work, such as building a large model. Pure."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_SECONDS = 5.0


@contextmanager
def heartbeat(
    what: str, say: Callable[[str], None], *, so_far: Callable[[], str] | None = None, every: float = _SECONDS
) -> Iterator[None]:
    """Call `say` with `   building the model: 15 s so far` every `every` seconds while the block runs.

    A shorter block prints nothing. so_far: describes the progress. A second thread calls it and `say`.
    """
    began = time.monotonic()
    ended = threading.Event()

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
