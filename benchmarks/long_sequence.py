"""A step on 262,144 tokens within half of the memory that it takes without tiles, offload and recompute, which fails there.

    python benchmarks/long_sequence.py results.jsonl                    goes on where it stopped
    python benchmarks/long_sequence.py results.jsonl --length 32768 --words 8192

A GPT of 2 layers with one head of width 64, on one process and on two that share the sample. The limit is one on private memory
(`ulimit -d`) of each process, Python and torch within it: half of what tools/estimate_memory.py predicts of the plain run. Attention's
work grows with the square of the length: one head of 64 takes the least of it.

A record has what was predicted beforehand, and what the kernel measured of each process: the largest resident memory, and processor
seconds. A run on 128 tokens tells how much of that Python and torch are.
"""

import argparse
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
from functools import cache
from pathlib import Path
from shlex import split
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
MODEL = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 1 --position-embedding-type rope --micro-batch-size 1 "
    "--hidden-dropout 0 --attention-dropout 0 --bf16 --device cpu"
)
SMALL = (
    "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1 --cpu-offloading-num-layers 2 "
    "--optimizer-offload-fraction 0 --tiled-mlp 64 --tiled-loss 64"
)
RUN = "--train-iters 1 --lr 1e-3 --eval-iters 0 --log-interval 1 --mock-data --tokenizer-type NullTokenizer --no-check-memory"


def flags_of(length: int, words: int, ranks: int) -> list[str]:
    return split(f"{MODEL} --seq-length {length} --vocab-size {words} --context-parallel-size {ranks}")


def predicted(flags: list[str], ranks: int) -> int:
    """Bytes of a rank, by tools/estimate_memory.py; nothing is allocated."""
    command = [sys.executable, str(ROOT / "tools/estimate_memory.py"), "--world-size", str(ranks), *flags]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return int(re.search(r"worst rank: stage \d+, ([\d,]+) bytes", said)[1].replace(",", ""))


def trained(flags: list[str], ranks: int, limit: int | None, timeout: float) -> dict:
    """One step over `ranks` processes, each of at most `limit` bytes: its end, loss and seconds, and each process' memory and time."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    began, most = time.monotonic(), "unlimited" if limit is None else limit // 1024
    with tempfile.TemporaryDirectory() as folder:
        outs, processes = [Path(folder, f"rank{rank}") for rank in range(ranks)], []
        for rank, out in enumerate(outs):
            place = {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(ranks),
                "LOCAL_WORLD_SIZE": str(ranks),
            }
            place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            command = [
                "sh",
                "-c",
                f'ulimit -d {most}; exec "$@"',
                "sh",
                sys.executable,
                "pretrain_gpt.py",
                *flags,
                *split(RUN),
            ]
            command += ["--offload-dir", folder] if "--tiled-loss" in flags else []
            env = os.environ | {"OMP_NUM_THREADS": "1"} | (place if ranks > 1 else {})
            with out.open("w") as file:
                processes.append(subprocess.Popen(command, cwd=ROOT, env=env, stdout=file, stderr=subprocess.STDOUT))
        ends = waited_for(processes, timeout)
        said = "".join(out.read_text() for out in outs)
    loss = re.search(r"lm loss: (\S+)", said)
    return {
        "codes": [process.returncode for process in processes],
        "loss": float(loss[1]) if loss else None,
        "out of memory": "out of memory" in said,
        "resident": [end.ru_maxrss * 1024 for end in ends],
        "seconds": round(time.monotonic() - began, 1),
        "processor seconds": [round(end.ru_utime + end.ru_stime, 1) for end in ends],
        "end": said[-600:] if loss is None else "",
    }


def waited_for(processes: list[subprocess.Popen], timeout: float) -> list[Any]:
    """What the kernel says of each process that has ended (`os.wait4`); those that run longer than `timeout` seconds are killed."""
    began, ends = time.monotonic(), {}
    while len(ends) < len(processes):
        for process in processes:
            if process.pid not in ends and (ended := os.wait4(process.pid, os.WNOHANG))[0]:
                process.returncode, ends[process.pid] = os.waitstatus_to_exitcode(ended[1]), ended[2]
        if time.monotonic() - began > timeout:
            for process in processes:
                process.kill()  # does nothing to those that have ended
        time.sleep(0.1)
    return [ends[process.pid] for process in processes]


@cache
def needs(kind: str, length: int, words: int, ranks: int) -> tuple[list[str], int]:
    """The flags of a run, and the bytes that it is predicted to need. kind: "small" with tiles, offload and recompute; or "plain"."""
    flags = flags_of(length, words, ranks)
    if kind == "plain":
        return flags, predicted(flags, ranks)
    return [*flags, *split(SMALL)], predicted([*flags, *split(SMALL), "--offload-dir", "/tmp"], ranks)


def case(length: int, words: int, ranks: int, kind: str, timeout: float) -> dict:
    """kind: "small", "plain", or "short": as "small" on 128 tokens and without a limit."""
    found = {"length": length, "words": words, "ranks": ranks, "kind": kind, "limit": None}
    if kind == "short":
        return found | trained([*flags_of(128, words, ranks), *split(SMALL)], ranks, None, timeout)
    flags, here = needs(kind, length, words, ranks)
    limit = needs("plain", length, words, ranks)[1] // 2
    return found | {"limit": limit, "predicted": here} | trained(flags, ranks, limit, timeout)


def held(one: dict) -> bool:
    """The step was made, or ended by want of memory if it is the plain one."""
    made = not any(one["codes"]) and one["loss"] is not None
    return not made and one["out of memory"] if one["kind"] == "plain" else made


def told(one: dict) -> str:
    """One line."""
    end = f"loss {one['loss']}" if one["loss"] else "out of memory" if one["out of memory"] else one["end"]
    limit = (
        f"predicted {one['predicted'] / 2**30:.3f} GiB, limit {one['limit'] / 2**30:.3f} GiB"
        if one["limit"]
        else "no limit"
    )
    resident = ", ".join(f"{x / 2**30:.3f}" for x in one["resident"])
    seconds = ", ".join(map(str, one["processor seconds"]))
    return (
        f"{one['ranks']} rank(s), {one['kind']}: {limit}: {end}, resident {resident} GiB, {seconds} s of processor time"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, help="a file of JSON lines, one per run, that is added to")
    parser.add_argument("--length", type=int, default=262144)
    parser.add_argument("--words", type=int, default=4096)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--timeout-minutes", type=float, default=60)
    given = parser.parse_args()
    known = [json.loads(line) for line in given.results.read_text().splitlines()] if given.results.exists() else []
    mine = []
    for ranks in given.ranks:
        for kind in ("small", "plain", "short"):
            key = {"length": given.length, "words": given.words, "ranks": ranks, "kind": kind}
            one = next((x for x in known if key.items() <= x.items()), None)
            if one is None:
                one = case(given.length, given.words, ranks, kind, 60 * given.timeout_minutes)
                with given.results.open("a") as file:
                    file.write(json.dumps(one) + "\n")
            mine.append(one)
            print(told(one), flush=True)
    return 0 if all(map(held, mine)) else 1


if __name__ == "__main__":
    sys.exit(main())
