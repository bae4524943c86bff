"""Train a step on 262,144 tokens within half of the memory that it needs without tiling, offload and recompute.

    python benchmarks/long_sequence.py results.jsonl                    runs that are recorded already are not repeated
    python benchmarks/long_sequence.py results.jsonl --length 32768 --words 8192

The model is a GPT of 2 layers with one head of width 64, on one process and on two that share the sample. The limit is on the
private memory (`ulimit -d`) of each process, including Python and torch: half of what tools/estimate_memory.py predicts for the
plain run, which must fail there. Attention's work grows with the square of the length, and is smallest with one head of 64.

A record has the prediction, and what the kernel measured of each process: peak resident memory and processor seconds. A run on
128 tokens shows how much of that Python and torch take.
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
    """Predict the bytes of the worst rank by tools/estimate_memory.py, which allocates nothing."""
    command = [sys.executable, str(ROOT / "tools/estimate_memory.py"), "--world-size", str(ranks), *flags]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return int(re.search(r"worst rank: stage \d+, ([\d,]+) bytes", output)[1].replace(",", ""))


def trained(flags: list[str], ranks: int, limit: int | None, timeout: float) -> dict:
    """Train one step in `ranks` processes, each limited to `limit` bytes of private memory.

    Returns exit codes, loss and seconds, and the peak memory and processor time of each process.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    start = time.monotonic()
    limit_kib = "unlimited" if limit is None else limit // 1024
    with tempfile.TemporaryDirectory() as folder:
        outputs = [Path(folder, f"rank{rank}") for rank in range(ranks)]
        processes = []
        for rank, output in enumerate(outputs):
            rank_env = {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(ranks),
                "LOCAL_WORLD_SIZE": str(ranks),
            }
            rank_env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            command = [
                "sh",
                "-c",
                f'ulimit -d {limit_kib}; exec "$@"',
                "sh",
                sys.executable,
                "pretrain_gpt.py",
                *flags,
                *split(RUN),
            ]
            if "--tiled-loss" in flags:
                command += ["--offload-dir", folder]
            env = os.environ | {"OMP_NUM_THREADS": "1"}
            if ranks > 1:
                env |= rank_env
            with output.open("w") as file:
                processes.append(subprocess.Popen(command, cwd=ROOT, env=env, stdout=file, stderr=subprocess.STDOUT))
        usages = wait_for(processes, timeout)
        text = "".join(output.read_text() for output in outputs)
    loss = re.search(r"lm loss: (\S+)", text)
    return {
        "codes": [process.returncode for process in processes],
        "loss": float(loss[1]) if loss else None,
        "out of memory": "out of memory" in text,
        "resident": [usage.ru_maxrss * 1024 for usage in usages],
        "seconds": round(time.monotonic() - start, 1),
        "processor seconds": [round(usage.ru_utime + usage.ru_stime, 1) for usage in usages],
        "end": text[-600:] if loss is None else "",
    }


def wait_for(processes: list[subprocess.Popen], timeout: float) -> list[Any]:
    """Wait until all processes have ended; return the resource usage of each (`os.wait4`).

    Processes that run longer than `timeout` seconds are killed.
    """
    start = time.monotonic()
    usage_of: dict[int, Any] = {}
    while len(usage_of) < len(processes):
        for process in processes:
            if process.pid in usage_of:
                continue
            pid, status, usage = os.wait4(process.pid, os.WNOHANG)
            if pid:
                process.returncode = os.waitstatus_to_exitcode(status)
                usage_of[process.pid] = usage
        if time.monotonic() - start > timeout:
            for process in processes:
                process.kill()  # has no effect on those that have ended
        time.sleep(0.1)
    return [usage_of[process.pid] for process in processes]


@cache
def needs(kind: str, length: int, words: int, ranks: int) -> tuple[list[str], int]:
    """Return the flags of a run, and its predicted bytes. kind: "plain", or "small" with tiling, offload, recompute."""
    flags = flags_of(length, words, ranks)
    if kind == "plain":
        return flags, predicted(flags, ranks)
    return [*flags, *split(SMALL)], predicted([*flags, *split(SMALL), "--offload-dir", "/tmp"], ranks)


def case(length: int, words: int, ranks: int, kind: str, timeout: float) -> dict:
    """Return the record of a run. kind: "small", "plain", or "short": like "small" on 128 tokens, without a limit."""
    record = {"length": length, "words": words, "ranks": ranks, "kind": kind, "limit": None}
    if kind == "short":
        return record | trained([*flags_of(128, words, ranks), *split(SMALL)], ranks, None, timeout)
    flags, predicted_bytes = needs(kind, length, words, ranks)
    limit = needs("plain", length, words, ranks)[1] // 2
    return record | {"limit": limit, "predicted": predicted_bytes} | trained(flags, ranks, limit, timeout)


def is_as_expected(record: dict) -> bool:
    """Whether the run trained a step; the plain one is expected to run out of memory instead."""
    has_trained = not any(record["codes"]) and record["loss"] is not None
    if record["kind"] == "plain":
        return not has_trained and record["out of memory"]
    return has_trained


def as_text(record: dict) -> str:
    """Return a record as one line."""
    if record["loss"]:
        end = f"loss {record['loss']}"
    elif record["out of memory"]:
        end = "out of memory"
    else:
        end = record["end"]
    limit = "no limit"
    if record["limit"]:
        limit = f"predicted {record['predicted'] / 2**30:.3f} GiB, limit {record['limit'] / 2**30:.3f} GiB"
    resident = ", ".join(f"{x / 2**30:.3f}" for x in record["resident"])
    seconds = ", ".join(map(str, record["processor seconds"]))
    return (
        f"{record['ranks']} rank(s), {record['kind']}: {limit}: {end}, resident {resident} GiB, "
        f"{seconds} s of processor time"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, help="a file of JSON lines, one per run, that is added to")
    parser.add_argument("--length", type=int, default=262144)
    parser.add_argument("--words", type=int, default=4096)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--timeout-minutes", type=float, default=60)
    options = parser.parse_args()
    recorded = []
    if options.results.exists():
        recorded = [json.loads(line) for line in options.results.read_text().splitlines()]
    records = []
    for ranks in options.ranks:
        for kind in ("small", "plain", "short"):
            key = {"length": options.length, "words": options.words, "ranks": ranks, "kind": kind}
            record = next((earlier for earlier in recorded if key.items() <= earlier.items()), None)
            if record is None:
                record = case(options.length, options.words, ranks, kind, 60 * options.timeout_minutes)
                with options.results.open("a") as file:
                    file.write(json.dumps(record) + "\n")
            records.append(record)
            print(as_text(record), flush=True)
    return 0 if all(map(is_as_expected, records)) else 1


if __name__ == "__main__":
    sys.exit(main())
