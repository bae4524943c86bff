"""pretrain_gpt.py, of which the last rank is killed inside its fifth hop round the ring: it has begun to send and will not receive."""

import os
import runpy
import signal
import sys
from itertools import count
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
sys.path.insert(1, str(ROOT / "tests" / "support"))
sys.path.insert(2, str(ROOT / "tests" / "campaigns"))

from megatron.core.parallel import collectives  # noqa: E402

_hops, _start = count(1), collectives.start_shift


def start_shift(*given: object, **more: object) -> object:
    started = _start(*given, **more)
    if next(_hops) == 5 and os.environ["RANK"] == str(int(os.environ["WORLD_SIZE"]) - 1):
        os.kill(os.getpid(), signal.SIGKILL)
    return started


if __name__ == "__main__":
    collectives.start_shift = start_shift
    runpy.run_path(str(ROOT / "pretrain_gpt.py"), run_name="__main__")
