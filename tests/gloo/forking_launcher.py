"""torchrun's agent over ranks that it forks: `forking_launcher.py RANKS SCRIPT ARGUMENTS`. They need not import torch again."""

import runpy
import socket
import sys

from torch.distributed.launcher.api import LaunchConfig, elastic_launch


def follow(*words: str) -> None:
    sys.argv = list(words)
    runpy.run_path(words[0], run_name="__main__")


if __name__ == "__main__":
    ranks, *words = sys.argv[1:]
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    options = {"min_nodes": 1, "max_nodes": 1, "nproc_per_node": int(ranks), "start_method": "fork"}
    place = {"rdzv_backend": "static", "rdzv_endpoint": f"127.0.0.1:{port}", "rdzv_configs": {"rank": 0}}
    elastic_launch(LaunchConfig(**options, **place, run_id="1", monitor_interval=0.1, max_restarts=0), follow)(*words)
