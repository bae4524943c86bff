"""Processor time of one rank's step outside kernels and communication, at data-parallel sizes of 1, 2, 4 and 8 with equal local work.

    python benchmarks/rank_overhead.py                                  ZeRO stage 0
    python benchmarks/rank_overhead.py --zero-stage 3 --sizes 1 8

Each size is one process: rank 0 of a job whose collectives return at once (torch's "fake" backend), so that nothing communicates or
waits. The model is so small (4 layers of 16, 2 x 8 tokens) that its kernels take almost nothing: what is left is the framework and, told
apart, the calls of torch.distributed. The processes take turns of `--steps` steps. Prints milliseconds of processor time a step outside
of these calls (median, least and most of a turn), its median ratio to the first size, and the milliseconds inside of them.
"""

import argparse
import functools
import json
import os
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tools.benchmarking.work import Contender, Work


def work_of(size: int, options: argparse.Namespace) -> Work:
    sizes = {"vocab_size": 128, "seq_length": 8, "micro_batch_size": 2, "global_batch_size": 2 * size}
    kind = "zero3" if options.zero_stage == 3 else "dp"
    return Work(4, options.hidden, 2, **sizes, parallel=kind, ranks=size)


def run_rank(size: int, options: argparse.Namespace) -> None:
    """Answers each line of stdin with seconds of processor time of a step, and how much of it is inside torch.distributed."""
    import torch
    import torch.distributed as dist
    from torch.testing._internal.distributed import fake_pg  # registers the backend

    from megatron.core import comm
    from tools.benchmarking.ours import Ours

    read = comm.StoreGroup._get  # agreement at the start, where other ranks say what rank 0 says
    comm.StoreGroup._get = lambda group, key, x: read(group, re.sub(r"(agreement/\d+)/\d+$", r"\1/0", key), x)
    inside = 0.0

    def timed(call: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(call)
        def run(*args: Any, **options: Any) -> Any:
            nonlocal inside
            began = time.process_time()
            result = call(*args, **options)
            inside += time.process_time() - began
            return result

        return run

    start, wait = comm.TorchGroup._start, comm._wait_for
    comm.TorchGroup._start = lambda group, call, *tensors, **options: start(group, timed(call), *tensors, **options)
    comm._wait_for = timed(wait)
    torch.set_num_threads(1)
    assert fake_pg
    dist.init_process_group("fake", store=dist.HashStore(), rank=0, world_size=size)
    answers, sys.stdout = sys.stdout, sys.stderr
    contender = Ours(Contender("ours"), work_of(size, options), "cpu")
    for _ in range(5):
        contender.step()
    for _ in sys.stdin:
        began, inside = time.process_time(), 0.0
        for _ in range(options.steps):
            contender.step()
        taken = time.process_time() - began
        print(json.dumps([taken / options.steps, inside / options.steps]), file=answers, flush=True)


def start(size: int) -> subprocess.Popen:
    env = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size)}
    env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", "OMP_NUM_THREADS": "1"}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    return subprocess.Popen(
        [sys.executable, __file__, *sys.argv[1:], "--one", str(size)], env=os.environ | env, **pipes
    )


def ask(process: subprocess.Popen) -> tuple[float, float]:
    """Milliseconds of a step outside and inside of torch.distributed."""
    print("step", file=process.stdin, flush=True)
    taken, inside = json.loads(process.stdout.readline())
    return 1000 * (taken - inside), 1000 * inside


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", type=int, default=[1, 2, 4, 8], help="data-parallel sizes")
    parser.add_argument("--zero-stage", type=int, choices=(0, 3), default=0)
    parser.add_argument("--hidden", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=30, help="of one turn")
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        run_rank(options.one, options)
        return 0
    running = {size: start(size) for size in options.sizes}
    taken: dict[int, list[tuple[float, float]]] = {size: [] for size in running}
    try:
        for _ in range(options.rounds):
            for size, process in running.items():
                taken[size].append(ask(process))
    finally:
        for process in running.values():
            process.kill()
    first = [outside for outside, _ in taken[options.sizes[0]]]
    print(f"ZeRO stage {options.zero_stage}, {options.rounds} turns of {options.steps} steps")
    print("data-parallel size   ms a step (least to most)   ratio   ms inside torch.distributed")
    for size, found in taken.items():
        outside, inside = zip(*found)
        ratio = statistics.median(a / b for a, b in zip(outside, first))
        shown = f"{statistics.median(outside):9.3f} ({min(outside):.3f} to {max(outside):.3f})"
        print(f"{size:18}   {shown}   {ratio:.2f}   {statistics.median(inside):.3f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
