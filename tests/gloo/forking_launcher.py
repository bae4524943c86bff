"""torchrun's agent over ranks that it forks: `forking_launcher.py RANKS SCRIPT ARGUMENTS`. They need not import torch again.

RESTARTS=2           how often the agent starts all ranks again after one has failed (torchrun's --max-restarts)
NODES=2 NODE_RANK=1  the agent of one of several machines, each with RANKS ranks, which meet at MEETING_PORT
"""

import os
import runpy
import signal
import socket
import sys

from torch.distributed.launcher.api import LaunchConfig, elastic_launch


def follow(*words: str) -> None:
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):  # the agent's handlers
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.argv = list(words)
    runpy.run_path(words[0], run_name="__main__")


if __name__ == "__main__":
    ranks, *words = sys.argv[1:]
    port = os.environ.get("MEETING_PORT")
    if port is None:
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            port = listener.getsockname()[1]
    nodes, restarts = int(os.environ.get("NODES", 1)), int(os.environ.get("RESTARTS", 0))
    options = {"min_nodes": nodes, "max_nodes": nodes, "nproc_per_node": int(ranks), "start_method": "fork"}
    here = {"rank": int(os.environ.get("NODE_RANK", 0))}
    place = {"rdzv_backend": "static", "rdzv_endpoint": f"127.0.0.1:{port}", "rdzv_configs": here}
    elastic_launch(LaunchConfig(**options, **place, run_id="1", monitor_interval=0.1, max_restarts=restarts), follow)(
        *words
    )
