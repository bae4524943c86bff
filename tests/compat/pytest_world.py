"""Runs pytest on several ranks, forked from one process that has imported torch, with CUDA's part done by the CPU.

    python pytest_world.py RANKS PORT OUTPUT [pytest's arguments]

Rank r writes to the file OUTPUT/r. The exit code is the worst of the ranks'.
"""

import os
import sys
from pathlib import Path

import pytest
import torch

import megatron.core.tensor_parallel.layers  # noqa: F401  # imported once, not by every rank
from megatron.porting.map_cuda_to_cpu import map_to_cpu

map_to_cpu()


def run(rank: int, ranks: int, port: str, output: Path, arguments: list[str]) -> int:
    os.environ |= {"LOCAL_RANK": str(rank), "RANK": str(rank), "WORLD_SIZE": str(ranks)}
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": port}
    torch.set_num_threads(1)
    file = os.open(output / str(rank), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(file, 1)
    os.dup2(file, 2)
    return int(pytest.main(["-p", "no:cacheprovider", *arguments]))


if __name__ == "__main__":
    ranks, port, output, arguments = int(sys.argv[1]), sys.argv[2], Path(sys.argv[3]), sys.argv[4:]
    children = []
    for rank in range(ranks):
        if not (child := os.fork()):
            code = run(rank, ranks, port, output, arguments)
            sys.stdout.flush()
            os._exit(code)
        children.append(child)
    sys.exit(max(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children))
