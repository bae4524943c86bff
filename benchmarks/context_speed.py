"""Attention of a long sample that two processes share round the ring, beside one process with two threads and beside torch's own ring.

    python benchmarks/context_speed.py results.jsonl                         four shapes at 8,192 tokens, about four minutes of a quiet machine
    python benchmarks/context_speed.py results.jsonl --rounds 9 --shapes 0 2
    python benchmarks/context_speed.py --profile                             where a rank's time goes, of the first shape

Two processes over gloo, one thread each; while rank 0 computes alone with two threads, rank 1 waits. All ways begin with heads as a
layer has them, [s, b, n, d]; their kernels want each head's rows side by side, and each way copies them. In each round all ways take
their turn, each round beginning with another, forward and backward, causal, without dropout; before the first round their results are
compared. A line of the record has the median seconds of each way, processor seconds of both processes, and two ratios, each the median over rounds, with their least
and largest beside them:

    of one process     one process' seconds / ours: at least 0.85
    of torch's ring    seconds of torch's ring / ours: at least 1. Of its two ways to pass keys on that with the smaller median (the
                       faster one of each round would be the luckier one)

Exit code 1 if a ratio is less. Other work on the machine makes the seconds noise; processor seconds are robust.
"""

import argparse
import json
import os
import resource
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SHAPES = (
    (8, 8, 64, "float32"),
    (8, 8, 64, "bfloat16"),
    (8, 2, 64, "float32"),
    (4, 4, 128, "bfloat16"),
)  # heads, groups, width
LEAST = {"of one process": 0.85, "of torch's ring": 1.0}
CLOSE = {"float32": 1e-5, "bfloat16": 3e-2}  # of a tensor's largest value
RANKS = 2

Way = Callable[[], "list"]  # forward and backward once: the result and the gradients of q, k, v, of my rows


# ---------------------------------------------------------------- one rank


def ways_of(shape: tuple[int, int, int, str], length: int) -> dict[str, Way]:
    """Every rank must call each of them."""
    import torch
    from torch.nn.functional import scaled_dot_product_attention

    from megatron.core.context_parallel.cp_attention import METHODS, AttentionInputs, ContextParallel
    from megatron.core.ops.dropout import AttentionDropout, DropoutKeys
    from megatron.core.ops.shard_sequence import shard_sequence
    from megatron.core.parallel.global_state import get_mesh

    heads, groups, width, dtype = shape
    axis, draw = get_mesh()["cp"], torch.Generator().manual_seed(7)
    whole = [
        torch.randn(length, 1, n, width, generator=draw).to(getattr(torch, dtype))
        for n in (heads, groups, groups, heads)
    ]
    mine = [shard_sequence(x, axis, dim=0) for x in whole]  # [s / c, 1, n, d]

    def ours(kind: str) -> list[torch.Tensor]:
        q, k, v = (x.detach().requires_grad_() for x in mine[:3])
        dropout = AttentionDropout(0.0, DropoutKeys(0), 0, 0)
        out = METHODS[kind].attend(AttentionInputs(q, k, v, None, dropout, "auto", plain), ContextParallel(axis))
        out.backward(mine[3])
        return [out.detach(), q.grad, k.grad, v.grad]

    def plain(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, _: None) -> torch.Tensor:
        of_heads = (x.permute(1, 2, 0, 3).contiguous() for x in (q, k, v))  # float32 is faster so
        return scaled_dot_product_attention(*of_heads, is_causal=True, enable_gqa=heads != groups).permute(2, 0, 1, 3)

    def alone() -> list[torch.Tensor]:
        if axis.rank > 0:
            return []
        torch.set_num_threads(RANKS)
        q, k, v = (x.detach().requires_grad_() for x in whole[:3])
        out = plain(q, k, v, None)
        out.backward(whole[3])
        torch.set_num_threads(1)
        return [shard_sequence(x, axis, dim=0) for x in (out.detach(), q.grad, k.grad, v.grad)]

    def torchs(rotate: str) -> list[torch.Tensor]:
        return of_torch([x.permute(1, 2, 0, 3).contiguous() for x in mine], rotate)

    ways: dict[str, Way] = {
        "one process": alone,
        **{kind: partial(ours, kind) for kind in ("p2p", "all_gather", "a2a")},
    }
    return ways | {f"torch, {rotate}": partial(torchs, rotate) for rotate in ("alltoall", "allgather")}


def of_torch(heads: list, rotate: str) -> list:
    """torch's public entry has no kernel on CPUs; its two inner functions have. heads: q, k, v and a gradient [b, n, s / c, d]."""
    import torch
    from torch.distributed.tensor.experimental._context_parallel import _attention as theirs

    theirs.set_rotate_method(rotate)
    q, k, v, grad = heads
    group, aten = torch.distributed.group.WORLD, torch.ops.aten
    forward = aten._scaled_dot_product_flash_attention_for_cpu.default
    backward = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
    out, log_sums, *_ = theirs._templated_ring_attention(group, 2, forward, q, k, v, is_causal=True)
    given = (grad, "grad_out", q, k, v, out, log_sums)
    grads = theirs._templated_ring_attention_backward(group, 2, backward, *given, is_causal=True, dropout_p=0.0)
    return [x.permute(2, 0, 1, 3) for x in (out, *grads[:3])]


def measured(way: Way) -> tuple[float, float, list]:
    """Seconds until all ranks are done, processor seconds of this one, and what the way returns."""
    import torch.distributed as dist

    dist.barrier()
    began, used = time.monotonic(), resource.getrusage(resource.RUSAGE_SELF)
    found = way()
    now = resource.getrusage(resource.RUSAGE_SELF)
    dist.barrier()
    return time.monotonic() - began, now.ru_utime + now.ru_stime - used.ru_utime - used.ru_stime, found


def same(found: dict[str, list], dtype: str) -> None:
    """Raises AssertionError if a way's numbers are not those of the ring, up to rounding."""
    for name, tensors in found.items():
        for what, x, expected in zip(("result", "dq", "dk", "dv"), tensors, found["p2p"]):
            worst = ((x.float() - expected.float()).abs().max() / expected.float().abs().max()).item()
            assert worst <= CLOSE[dtype], f"{name}: {what} differs by {worst}"


def rank_main(folder: Path, shapes: list[int], length: int, rounds: int) -> None:
    """Measures these shapes, and writes what this rank saw to a file of its own in `folder`."""
    sys.path.insert(0, str(ROOT))
    import torch
    import torch.distributed as dist

    from megatron.core import parallel_state
    from megatron.core.parallel.accelerator import Device

    Device("cpu").prepare(
        bf16=False
    )  # malloc as in a training run, for all ways; with two threads as one process has them
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    parallel_state.initialize_model_parallel(context_parallel_size=RANKS)
    seen = []
    for shape in (SHAPES[number] for number in shapes):
        ways, times = ways_of(shape, length), []
        same({name: measured(way)[2] for name, way in ways.items()}, shape[-1])  # warm, too
        names = sorted(ways)
        for turn in range(rounds):
            order = names[turn % len(names) :] + names[: turn % len(names)]
            times.append({name: measured(ways[name])[:2] for name in order})
        seen.append(times)
    (folder / str(dist.get_rank())).write_text(json.dumps(seen))


def profile_main(length: int) -> None:
    """Prints rank 0's table of the ring, by time of its own."""
    sys.path.insert(0, str(ROOT))
    import torch
    import torch.distributed as dist

    from megatron.core import parallel_state
    from megatron.core.parallel.accelerator import Device

    Device("cpu").prepare(
        bf16=False
    )  # malloc as in a training run, for all ways; with two threads as one process has them
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    parallel_state.initialize_model_parallel(context_parallel_size=RANKS)
    way = ways_of(SHAPES[0], length)["p2p"]
    way()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        way()
    dist.barrier()
    if dist.get_rank() == 0:
        print(profile.key_averages().table(sort_by="self_cpu_time_total", row_limit=25, max_name_column_width=60))


# ---------------------------------------------------------------- the command


def started(*arguments: str) -> None:
    """This file as two ranks, until both have ended. Raises CalledProcessError if one fails."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    place = {"WORLD_SIZE": str(RANKS), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": str(RANKS)}
    command = [sys.executable, __file__, *arguments]
    processes = [subprocess.Popen(command, env=os.environ | place | {"RANK": str(rank)}) for rank in range(RANKS)]
    for process in processes:
        if process.wait():
            for other in processes:
                other.kill()
            raise subprocess.CalledProcessError(process.returncode, command)


def record(shape: tuple[int, int, int, str], length: int, ranks: list[list[dict]]) -> dict:
    """One line. ranks: of each rank its rounds, way -> (seconds, processor seconds)."""
    rounds = [{name: max(rank[name][0] for rank in both) for name in both[0]} for both in zip(*ranks)]
    used = [{name: sum(rank[name][1] for rank in both) for name in both[0]} for both in zip(*ranks)]
    seconds = {name: round(statistics.median(times[name] for times in rounds), 4) for name in sorted(rounds[0])}
    faster = min((name for name in seconds if name.startswith("torch")), key=seconds.__getitem__)
    peers = {"of one process": "one process", "of torch's ring": faster}
    ratios = {name: [times[peer] / times["p2p"] for times in rounds] for name, peer in peers.items()}
    middle = {name: round(statistics.median(values), 3) for name, values in ratios.items()}
    return {
        **dict(zip(("heads", "groups", "width", "dtype"), shape)),
        "length": length,
        "rounds": len(rounds),
        "seconds": seconds,
        "processor seconds": {name: round(statistics.median(times[name] for times in used), 4) for name in used[0]},
        **middle,
        "ranges": {name: [round(pick(values), 3) for pick in (min, max)] for name, values in ratios.items()},
        "ok": all(middle[name] >= least for name, least in LEAST.items()),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, nargs="?", help="a file of JSON lines, one per shape, that is added to")
    parser.add_argument("--length", type=int, default=8192, help="tokens of the sample (default: %(default)s)")
    parser.add_argument(
        "--rounds", type=int, default=5, help="of all ways, after one that warms up (default: %(default)s)"
    )
    numbers = range(len(SHAPES))
    parser.add_argument(
        "--shapes", type=int, nargs="+", choices=numbers, default=[*numbers], help="numbers in SHAPES (default: all)"
    )
    parser.add_argument("--profile", action="store_true", help="print rank 0's table of the ring, and measure nothing")
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if "RANK" in os.environ:
        profile_main(given.length) if given.profile else rank_main(
            given.folder, given.shapes, given.length, given.rounds
        )
        return 0
    if given.profile:
        started("--profile", "--length", str(given.length))
        return 0
    with tempfile.TemporaryDirectory() as folder:
        shapes = ("--shapes", *map(str, given.shapes))
        started("--folder", folder, "--length", str(given.length), "--rounds", str(given.rounds), *shapes)
        ranks = [json.loads(Path(folder, str(rank)).read_text()) for rank in range(RANKS)]
    lines = [record(SHAPES[number], given.length, list(both)) for number, *both in zip(given.shapes, *ranks)]
    for line in lines:
        print(json.dumps(line))
    if given.results:
        with given.results.open("a") as file:
            file.writelines(json.dumps(line) + "\n" for line in lines)
    return 0 if all(line["ok"] for line in lines) else 1


if __name__ == "__main__":
    sys.exit(main())
