"""Measure ring attention of a sample on two processes, beside one process with two threads and beside torch's own ring.

    python benchmarks/context_speed.py results.jsonl                         four shapes at 8,192 tokens, about four minutes of a quiet machine
    python benchmarks/context_speed.py results.jsonl --rounds 9 --shapes 0 2
    python benchmarks/context_speed.py --profile                             where a rank's time goes, of the first shape

Two processes over gloo have one thread each; while rank 0 computes alone with two threads, rank 1 waits. All contenders begin
with heads as a layer has them, [s, b, n, d]; their kernels need [b, n, s, d], and each contender copies them. In each round all
contenders take a turn, in an order that rotates: forward and backward, causal, without dropout. Before the first round their
results are compared. A record has the median seconds of each contender, processor seconds of both processes, and two ratios,
each the median over rounds, with the smallest and the largest beside it:

    of one process     one process' seconds / ours: at least 0.85
    of torch's ring    seconds of torch's ring / ours: at least 1. Of torch's two methods to rotate keys, the one with the smaller
                       median counts. (The faster one of each round would be favoured by noise.)

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

Contender = Callable[
    [], "list"
]  # one forward and backward: the output and the gradients of q, k, v, of this rank's rows


# ---------------------------------------------------------------- one rank


def make_contenders(shape: tuple[int, int, int, str], length: int) -> dict[str, Contender]:
    """Return all contenders by name. Every rank must call each of them."""
    import torch
    from torch.nn.functional import scaled_dot_product_attention

    from megatron.core.context_parallel.cp_attention import METHODS, AttentionInputs, ContextParallel
    from megatron.core.ops.layout_invariant_dropout import AttentionDropout, SampleDropoutKeys
    from megatron.core.ops.shard_sequence import shard_sequence
    from megatron.core.parallel.global_state import get_mesh

    heads, groups, width, dtype = shape
    axis = get_mesh()["cp"]
    generator = torch.Generator().manual_seed(7)
    # q, k, v and the gradient of the output
    full_inputs = [
        torch.randn(length, 1, n, width, generator=generator).to(getattr(torch, dtype))
        for n in (heads, groups, groups, heads)
    ]  # [s, 1, n, d]
    local_inputs = [shard_sequence(x, axis, dim=0) for x in full_inputs]  # [s / c, 1, n, d]

    def ours(kind: str) -> list[torch.Tensor]:
        q, k, v = (x.detach().requires_grad_() for x in local_inputs[:3])
        dropout = AttentionDropout(0.0, SampleDropoutKeys(0), 0, 0)
        out = METHODS[kind].attend(AttentionInputs(q, k, v, None, dropout, "auto", plain), ContextParallel(axis))
        out.backward(local_inputs[3])
        return [out.detach(), q.grad, k.grad, v.grad]

    def plain(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, _: None) -> torch.Tensor:
        # [s, b, n, d] -> [b, n, s, d]; contiguous, since float32 is faster then
        q, k, v = (x.permute(1, 2, 0, 3).contiguous() for x in (q, k, v))
        out = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=heads != groups)
        return out.permute(2, 0, 1, 3)  # [s, b, n, d]

    def alone() -> list[torch.Tensor]:
        if axis.rank > 0:
            return []
        torch.set_num_threads(RANKS)
        q, k, v = (x.detach().requires_grad_() for x in full_inputs[:3])
        out = plain(q, k, v, None)
        out.backward(full_inputs[3])
        torch.set_num_threads(1)
        return [shard_sequence(x, axis, dim=0) for x in (out.detach(), q.grad, k.grad, v.grad)]

    def torchs(rotate: str) -> list[torch.Tensor]:
        return of_torch([x.permute(1, 2, 0, 3).contiguous() for x in local_inputs], rotate)

    contenders: dict[str, Contender] = {"one process": alone}
    for kind in ("p2p", "all_gather", "a2a"):
        contenders[kind] = partial(ours, kind)
    for rotate in ("alltoall", "allgather"):
        contenders[f"torch, {rotate}"] = partial(torchs, rotate)
    return contenders


def of_torch(heads: list, rotate: str) -> list:
    """Run torch's ring attention forward and backward; return the output and gradients, [s / c, b, n, d].

    heads: q, k, v and the gradient of the output, [b, n, s / c, d]. Called are two inner functions, because torch's
    public entry has no kernel for CPUs.
    """
    import torch
    from torch.distributed.tensor.experimental._context_parallel import _attention as torch_ring

    torch_ring.set_rotate_method(rotate)
    q, k, v, grad = heads
    group = torch.distributed.group.WORLD
    aten = torch.ops.aten
    forward = aten._scaled_dot_product_flash_attention_for_cpu.default
    backward = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
    out, logsumexp, *_ = torch_ring._templated_ring_attention(group, 2, forward, q, k, v, is_causal=True)
    saved = (q, k, v, out, logsumexp)
    dq, dk, dv, *_ = torch_ring._templated_ring_attention_backward(
        group, 2, backward, grad, "grad_out", *saved, is_causal=True, dropout_p=0.0
    )
    return [x.permute(2, 0, 1, 3) for x in (out, dq, dk, dv)]


def measured(contender: Contender) -> tuple[float, float, list]:
    """Return the seconds until all ranks are done, the processor seconds of this one, and the contender's results."""
    import torch.distributed as dist

    dist.barrier()
    start = time.monotonic()
    usage_before = resource.getrusage(resource.RUSAGE_SELF)
    results = contender()
    usage = resource.getrusage(resource.RUSAGE_SELF)
    dist.barrier()
    seconds = time.monotonic() - start
    cpu_seconds = usage.ru_utime + usage.ru_stime - usage_before.ru_utime - usage_before.ru_stime
    return seconds, cpu_seconds, results


def check_same(results: dict[str, list], dtype: str) -> None:
    """Raise AssertionError if a contender's numbers are not those of our ring, up to rounding."""
    for name, tensors in results.items():
        for part, x, expected in zip(("result", "dq", "dk", "dv"), tensors, results["p2p"]):
            worst = ((x.float() - expected.float()).abs().max() / expected.float().abs().max()).item()
            assert worst <= CLOSE[dtype], f"{name}: {part} differs by {worst}"


def rank_main(folder: Path, shapes: list[int], length: int, rounds: int) -> None:
    """Measure these shapes, and write this rank's times to a file of its own in `folder`."""
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
    times_of_shapes = []
    for number in shapes:
        shape = SHAPES[number]
        contenders = make_contenders(shape, length)
        results = {name: measured(contender)[2] for name, contender in contenders.items()}  # a warm-up, too
        check_same(results, shape[-1])
        names = sorted(contenders)
        times = []
        for turn in range(rounds):
            order = names[turn % len(names) :] + names[: turn % len(names)]
            times.append({name: measured(contenders[name])[:2] for name in order})
        times_of_shapes.append(times)
    (folder / str(dist.get_rank())).write_text(json.dumps(times_of_shapes))


def profile_main(length: int) -> None:
    """Print the profile of our ring on rank 0, by self time."""
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
    ring = make_contenders(SHAPES[0], length)["p2p"]
    ring()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        ring()
    dist.barrier()
    if dist.get_rank() == 0:
        print(profile.key_averages().table(sort_by="self_cpu_time_total", row_limit=25, max_name_column_width=60))


# ---------------------------------------------------------------- the command


def run_ranks(*arguments: str) -> None:
    """Run this file as two ranks, until both have ended. Raises CalledProcessError if one fails."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    shared = {"WORLD_SIZE": str(RANKS), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": str(RANKS)}
    command = [sys.executable, __file__, *arguments]
    processes = [subprocess.Popen(command, env=os.environ | shared | {"RANK": str(rank)}) for rank in range(RANKS)]
    for process in processes:
        if process.wait():
            for other in processes:
                other.kill()
            raise subprocess.CalledProcessError(process.returncode, command)


def record(shape: tuple[int, int, int, str], length: int, ranks: list[list[dict]]) -> dict:
    """Return the record of a shape. ranks: the rounds of each rank, contender -> (seconds, processor seconds)."""
    rounds = [{name: max(rank[name][0] for rank in both) for name in both[0]} for both in zip(*ranks)]
    used = [{name: sum(rank[name][1] for rank in both) for name in both[0]} for both in zip(*ranks)]
    seconds = {name: round(statistics.median(times[name] for times in rounds), 4) for name in sorted(rounds[0])}
    faster = min((name for name in seconds if name.startswith("torch")), key=seconds.__getitem__)
    peers = {"of one process": "one process", "of torch's ring": faster}
    ratios = {name: [times[peer] / times["p2p"] for times in rounds] for name, peer in peers.items()}
    medians = {name: round(statistics.median(values), 3) for name, values in ratios.items()}
    return {
        **dict(zip(("heads", "groups", "width", "dtype"), shape)),
        "length": length,
        "rounds": len(rounds),
        "seconds": seconds,
        "processor seconds": {name: round(statistics.median(times[name] for times in used), 4) for name in used[0]},
        **medians,
        "ranges": {name: [round(min(values), 3), round(max(values), 3)] for name, values in ratios.items()},
        "ok": all(medians[name] >= least for name, least in LEAST.items()),
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
    options = parser.parse_args()
    if "RANK" in os.environ:
        if options.profile:
            profile_main(options.length)
        else:
            rank_main(options.folder, options.shapes, options.length, options.rounds)
        return 0
    if options.profile:
        run_ranks("--profile", "--length", str(options.length))
        return 0
    with tempfile.TemporaryDirectory() as folder:
        shapes = ("--shapes", *map(str, options.shapes))
        run_ranks("--folder", folder, "--length", str(options.length), "--rounds", str(options.rounds), *shapes)
        ranks = [json.loads(Path(folder, str(rank)).read_text()) for rank in range(RANKS)]
    records = []
    for number, *times_of_ranks in zip(options.shapes, *ranks):
        records.append(record(SHAPES[number], options.length, times_of_ranks))
    for line in records:
        print(json.dumps(line))
    if options.results:
        with options.results.open("a") as file:
            file.writelines(json.dumps(line) + "\n" for line in records)
    return 0 if all(line["ok"] for line in records) else 1


if __name__ == "__main__":
    sys.exit(main())
