"""The last words of a process, where torchrun reads them: the file that it names, in its own form."""

import contextlib
import json
import os
import time

_LONGEST = 20_000  # characters: torchrun prints all of them


def write_error_file(text: str, *, follows: bool = False) -> None:
    """Leave `text` for torchrun's last block, unless this process has left something already. Without torchrun nothing happens.

    follows: the error is another rank's. torchrun shows the earliest error it finds, and counts whole seconds.
    """
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path or os.path.exists(path):
        return
    text = text.rstrip()[:_LONGEST]
    stamp = str(int(time.time()) + follows)
    content = {"message": {"message": text, "extraInfo": {"py_callstack": text, "timestamp": stamp}}}
    with contextlib.suppress(OSError), open(path, "w") as file:  # torchrun removes its folder when it is killed
        json.dump(content, file)
