"""torchrun's agent over ranks that it forks: `forking_launcher.py RANKS SCRIPT ARGUMENTS`. They need not import torch again.

All but the start of a process is torch's: each rank has a session of its own, and is told nothing when the agent is killed.

RESTARTS=2           how often the agent starts all ranks again after one has failed (torchrun's --max-restarts)
NODES=2 NODE_RANK=1  the agent of one of several machines, each with RANKS ranks, which meet at MEETING_PORT
"""

import atexit
import contextlib
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
import time

from torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler import SubprocessHandler
from torch.distributed.launcher.api import LaunchConfig, elastic_launch


class Forked:
    """A child of this process; as much of a subprocess.Popen as the agent needs."""

    def __init__(self, pid: int):
        self.pid, self.returncode = pid, None

    def poll(self) -> int | None:
        if self.returncode is None:
            ended, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if ended else None
        return self.returncode

    def wait(self, timeout: float) -> int:
        deadline = time.monotonic() + timeout
        while self.poll() is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("a rank", timeout)
            time.sleep(0.01)
        return self.returncode


def follow(handler: SubprocessHandler, words: tuple[str, ...], environment: dict[str, str]) -> Forked:
    """In place of the handler's `_popen`."""
    if pid := os.fork():
        return Forked(pid)
    os.setsid()
    atexit._clear()  # the agent's
    for name in os.listdir("/proc/self/fd"):  # a rank that held the agent's store open would wait for its answers
        if int(name) > 2:
            with contextlib.suppress(OSError):
                os.close(int(name))
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv, code = list(words), 0
    try:
        runpy.run_path(words[0], run_name="__main__")
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        code = 1
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    ranks, script, *words = sys.argv[1:]
    port = os.environ.get("MEETING_PORT")
    if port is None:
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            port = listener.getsockname()[1]
    nodes, restarts = int(os.environ.get("NODES", 1)), int(os.environ.get("RESTARTS", 0))
    options = {"min_nodes": nodes, "max_nodes": nodes, "nproc_per_node": int(ranks)}
    here = {"rank": int(os.environ.get("NODE_RANK", 0))}
    place = {"rdzv_backend": "static", "rdzv_endpoint": f"127.0.0.1:{port}", "rdzv_configs": here}
    SubprocessHandler._popen = follow
    config = LaunchConfig(**options, **place, run_id="1", monitor_interval=0.1, max_restarts=restarts)
    elastic_launch(config, script)(*words)
