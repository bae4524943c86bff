"""marked_script.py over a file layer that goes wrong once, or is slow: of real processes, each with its own count of calls.

FAULT="1:17:EIO in"     call 17 of rank 1, of those that `failing_files` calls changes and reads of data; "killed" is SIGKILL
SLOW=0.002              seconds that every such call waits before
PART=5242880            bytes of a longer object that are sent at once
"""

import os
import runpy
import signal
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(1, str(Path(__file__).resolve().parents[1] / "support"))
sys.path.insert(2, str(Path(__file__).resolve().parents[1] / "campaigns"))

from failing_files import FailingFiles, FileCall, Killed

from megatron.core.storage import file_layer, fsspec_object_store


class Dying(FailingFiles):
    def call(self, kind: str, *what: object) -> object:
        time.sleep(float(os.environ.get("SLOW", 0)))
        return super().call(kind, *what)

    def go_wrong(self, kind: str, *what: object) -> object:
        sys.stderr.write(f"fault {self.hit.kind} {self.hit.name}\n")
        sys.stderr.flush()
        try:
            return super().go_wrong(kind, *what)
        except Killed:
            os.kill(os.getpid(), signal.SIGKILL)


def counts(call: FileCall) -> bool:
    return call.changes_disk or call.kind == "read_into"


if __name__ == "__main__":
    rank, _, rest = os.environ.get("FAULT", "").partition(":")
    at, _, how = rest.partition(":")
    mine = rank == os.environ.get("RANK", "0")
    fsspec_object_store.PART = int(os.environ.get("PART", fsspec_object_store.PART))
    file_layer.local = Dying(file_layer.local, int(at) if mine and at else 0, how, only=counts)
    runpy.run_path(str(Path(__file__).with_name("marked_script.py")), run_name="__main__")
    if not os.environ.get("FAULT"):
        sys.stdout.write(
            f"calls of rank {os.environ.get('RANK', '0')}: {' '.join(c.kind for c in file_layer.local.made)}\n"
        )
