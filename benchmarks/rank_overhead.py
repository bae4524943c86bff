"""Measure the framework's own CPU time of a step on one rank, at several data-parallel sizes with equal local work.

    python benchmarks/rank_overhead.py                                  ZeRO stage 0
    python benchmarks/rank_overhead.py --zero-stage 3 --sizes 1 8

Each size is one process: rank 0 of a job without any other rank. Its collectives copy this rank's part into the result and
return, so that nothing communicates or waits, and no time of torch.distributed is counted. (To subtract it by a clock would cost
as much as it measures.) The model is so small (4 layers of 16, 2 x 8 tokens) that its kernels take almost no time: the rest is
the framework. The processes take turns of `--steps` steps, and the order reverses every turn. Prints milliseconds of processor
time a step (median, smallest and largest of a turn) and its ratio to the first size: of the smallest turns, which other programs
disturb least, and the median of the rounds.
"""

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tools.benchmarking.work import Contender, Work


def work_of(size: int, options: argparse.Namespace) -> Work:
    sizes = {"vocab_size": 128, "seq_length": 8, "micro_batch_size": 2, "global_batch_size": 2 * size}
    kind = "zero3" if options.zero_stage == 3 else "dp"
    return Work(4, options.hidden, 2, **sizes, parallel=kind, ranks=size)


class CompletedWork:
    """Handle of a collective that is complete."""

    def wait(self) -> None:
        return


def replace_collectives() -> None:
    """Let the calls of `core/parallel/collectives.py` fill a result of the right size from this rank's part alone."""
    from megatron.core.parallel import collectives

    completed = CompletedWork()

    def keep(*_: Any, **__: Any) -> CompletedWork:
        return completed

    def repeat(out: Any, x: Any, **_: Any) -> CompletedWork:
        out.view(-1, *x.shape).copy_(x)
        return completed

    def take_first(out: Any, x: Any, **_: Any) -> CompletedWork:
        out.copy_(x[: len(out)])
        return completed

    collectives.dist.all_reduce = keep
    collectives.dist.all_to_all_single = take_first
    collectives._all_gather_single = repeat
    collectives._reduce_scatter_single = take_first
    # Two ranks reduce-scatter by an exchange and a sum of our own; with more ranks gloo does it.
    collectives.TorchGroup._sum_of_two = lambda group, out, x: group._start(take_first, out, x)


def run_rank(size: int, options: argparse.Namespace) -> None:
    """Answer each line of stdin with the processor seconds of a step."""
    import torch
    import torch.distributed as dist
    from torch.testing._internal.distributed import fake_pg  # registers the backend

    from megatron.core.parallel import collectives
    from tools.benchmarking.ours import Ours

    # The agreement at the start reads an answer of every rank from the store: read rank 0's for all.
    read = collectives.StoreGroup._get
    collectives.StoreGroup._get = lambda group, key, x: read(group, re.sub(r"(agreement/\d+)/\d+$", r"\1/0", key), x)
    torch.set_num_threads(1)
    assert fake_pg
    dist.init_process_group("fake", store=dist.HashStore(), rank=0, world_size=size)
    answers = sys.stdout
    sys.stdout = sys.stderr  # other prints must not look like answers
    contender = Ours(Contender("ours"), work_of(size, options), "cpu")
    replace_collectives()
    for _ in range(5):
        contender.step()
    for _ in sys.stdin:
        start = time.process_time()
        for _ in range(options.steps):
            contender.step()
        print(json.dumps((time.process_time() - start) / options.steps), file=answers, flush=True)


def start(size: int) -> subprocess.Popen:
    """Start the process of a data-parallel size."""
    env = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size)}
    env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", "OMP_NUM_THREADS": "1"}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    return subprocess.Popen(
        [sys.executable, __file__, *sys.argv[1:], "--one", str(size)], env=os.environ | env, **pipes
    )


def ask(process: subprocess.Popen) -> float:
    """Measure a turn; return the milliseconds of a step."""
    print("step", file=process.stdin, flush=True)
    return 1000 * json.loads(process.stdout.readline())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", type=int, default=[1, 2, 4, 8], help="data-parallel sizes")
    parser.add_argument("--zero-stage", type=int, choices=(0, 3), default=0)
    parser.add_argument("--hidden", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--steps", type=int, default=30, help="of one turn")
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        run_rank(options.one, options)
        return 0
    running = {size: start(size) for size in options.sizes}
    taken: dict[int, list[float]] = {size: [] for size in running}
    try:
        for turn in range(options.rounds):
            sizes = list(running) if turn % 2 == 0 else list(reversed(running))
            for size in sizes:
                taken[size].append(ask(running[size]))
    finally:
        for process in running.values():
            process.kill()
    first = taken[options.sizes[0]]
    print(f"ZeRO stage {options.zero_stage}, {options.rounds} turns of {options.steps} steps")
    print("data-parallel size   ms a step (least to most)   ratio of the least   of the rounds")
    for size, turns in taken.items():
        ratio = statistics.median(a / b for a, b in zip(turns, first))
        milliseconds = f"{statistics.median(turns):9.3f} ({min(turns):.3f} to {max(turns):.3f})"
        print(f"{size:18}   {milliseconds}   {min(turns) / min(first):18.3f}   {ratio:.3f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
