"""A step on 262,144 tokens within half of the memory that it takes without tiles, offload and recompute, which fails there.

    python benchmarks/long_sequence.py results.jsonl                    goes on where it stopped
    python benchmarks/long_sequence.py results.jsonl --length 32768 --words 8192

A GPT of 2 layers of width 64, on one process and on two that share the sample. The limit is one on private memory (`ulimit -d`) of each
process, Python and torch within it: half of what tools/estimate_memory.py predicts of the plain run.
"""

import argparse
import json
import os
import re
import resource
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from shlex import split

ROOT = Path(__file__).resolve().parent.parent
MODEL = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --position-embedding-type rope --micro-batch-size 1 "
    "--hidden-dropout 0 --attention-dropout 0 --device cpu"
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


def trained(flags: list[str], ranks: int, limit: int, timeout: float) -> dict:
    """One step over `ranks` processes, each of at most `limit` bytes: its end, loss, seconds, and the resident peak."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    began, processes = time.monotonic(), []
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    with tempfile.TemporaryDirectory() as folder:
        outs = [Path(folder, f"rank{rank}") for rank in range(ranks)]
        for rank, out in enumerate(outs):
            place = {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(ranks),
                "LOCAL_WORLD_SIZE": str(ranks),
            }
            place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": "1"}
            command = ["sh", "-c", f'ulimit -d {limit // 1024}; exec "$@"', "sh", sys.executable, "pretrain_gpt.py"]
            with out.open("w") as file:
                processes.append(
                    subprocess.Popen(
                        [*command, *flags, *split(RUN), "--offload-dir", folder]
                        if "--tiled-loss" in flags
                        else [*command, *flags, *split(RUN)],
                        cwd=ROOT,
                        env=os.environ | (place if ranks > 1 else {"OMP_NUM_THREADS": "1"}),
                        stdout=file,
                        stderr=subprocess.STDOUT,
                    )
                )
        try:
            for process in processes:
                process.wait(timeout)
        finally:
            for process in processes:
                process.kill()
                process.wait()
        said = "".join(out.read_text() for out in outs)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    loss = re.search(r"lm loss: (\S+)", said)
    return {
        "codes": [process.returncode for process in processes],
        "loss": float(loss[1]) if loss else None,
        "out of memory": "out of memory" in said,
        "resident of any rank so far": after.ru_maxrss * 1024,
        "seconds": round(time.monotonic() - began, 1),
        "processor seconds": round(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, 1),
        "end": said[-600:] if loss is None else "",
    }


def case(length: int, words: int, ranks: int, kind: str, timeout: float) -> dict:
    """kind: "small" with tiles, offload and recompute, or "plain"."""
    plain = flags_of(length, words, ranks)
    small = [*plain, *split(SMALL)]
    whole = predicted(plain, ranks)
    needs = whole if kind == "plain" else predicted([*small, "--offload-dir", "/tmp"], ranks)
    found = {"length": length, "words": words, "ranks": ranks, "kind": kind, "limit": whole // 2, "predicted": needs}
    return found | trained(small if kind == "small" else plain, ranks, whole // 2, timeout)


def held(one: dict) -> bool:
    """The step was made if it is small, and ended by want of memory if it is not."""
    made = not any(one["codes"]) and one["loss"] is not None
    return made if one["kind"] == "small" else not made and one["out of memory"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, help="a file of JSON lines, one per run, that is added to")
    parser.add_argument("--length", type=int, default=262144)
    parser.add_argument("--words", type=int, default=1024)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--timeout-minutes", type=float, default=60)
    given = parser.parse_args()
    known = [json.loads(line) for line in given.results.read_text().splitlines()] if given.results.exists() else []
    mine = []
    for ranks in given.ranks:
        for kind in ("plain", "small"):
            key = {"length": given.length, "words": given.words, "ranks": ranks, "kind": kind}
            one = next((x for x in known if key.items() <= x.items()), None)
            if one is None:
                one = case(given.length, given.words, ranks, kind, 60 * given.timeout_minutes)
                with given.results.open("a") as file:
                    file.write(json.dumps(one) + "\n")
            mine.append(one)
            print(
                f"{ranks} rank(s), {kind}: predicted {one['predicted'] / 2**30:.2f} GiB, limit {one['limit'] / 2**30:.2f} GiB: "
                f"{'loss ' + str(one['loss']) if one['loss'] else 'out of memory' if one['out of memory'] else one['end']}, "
                f"{one['processor seconds']} s of processor time",
                flush=True,
            )
    return 0 if all(map(held, mine)) else 1


if __name__ == "__main__":
    sys.exit(main())
