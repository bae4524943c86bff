"""Peak memory of tools/preprocess_data.py with an input and with one ten times as long, for every kind of file.

    python benchmarks/preprocessing_memory.py --tokenizer-model tokenizer.json --documents 100000 --kinds jsonl gz zst parquet

Short documents are made up: common words, and a few that no other document has, so that also what a worker remembers
comes to its limit. Prints for each kind of file the peak of the largest process and the documents a second, at `--documents` and at
ten times as many, and the ratio of the two peaks. Linux; zst needs the package zstandard, parquet the package pyarrow.
"""

import argparse
import gzip
import json
import os
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
KINDS = ("jsonl", "gz", "zst", "parquet")
ROWS = 10_000  # documents that are made and written at a time


def batches(count: int) -> Iterator[list[str]]:
    """`count` texts of about 100 characters, the same in every run."""
    dice = random.Random(0)
    letters = "etaoinshrdlu"
    common = ["".join(dice.choices(letters, k=dice.randint(1, 9))) for _ in range(5000)]
    for first in range(0, count, ROWS):
        numbers = range(first, min(first + ROWS, count))
        yield [
            f"{' '.join([*dice.choices(common, k=10), *map(str, dice.choices(range(10**9), k=5))])}." for _ in numbers
        ]


def write_lines(path: str, count: int) -> None:
    """JSON lines; the ending of `path` says how they are compressed."""
    if path.endswith(".zst"):
        import zstandard

        opened = zstandard.open(path, "wb")
    else:
        opened = gzip.open(path, "wb", compresslevel=1) if path.endswith(".gz") else open(path, "wb")  # noqa: SIM115
    with opened as file:
        for texts in batches(count):
            file.write(b"".join(json.dumps({"text": text}).encode() + b"\n" for text in texts))


def write_parquet(path: str, count: int) -> None:
    import pyarrow
    import pyarrow.parquet

    schema = pyarrow.schema([("text", pyarrow.string())])
    with pyarrow.parquet.ParquetWriter(path, schema) as writer:
        for texts in batches(count):
            writer.write_table(pyarrow.table({"text": texts}, schema))


def write(kind: str, folder: str, count: int) -> str:
    """The path of a new file of this kind."""
    path = os.path.join(folder, {"gz": "x.jsonl.gz", "zst": "x.jsonl.zst"}.get(kind, f"x.{kind}"))
    (write_parquet if kind == "parquet" else write_lines)(path, count)
    return path


def run_tool(path: str, folder: str, options: argparse.Namespace) -> tuple[int, float]:
    """(bytes of the largest process, seconds) of the command on the file `path`."""
    command = [
        sys.executable,
        str(ROOT / "tools/preprocess_data.py"),
        "--input",
        path,
        "--output-prefix",
        f"{folder}/o",
    ]
    command += ["--workers", str(options.workers), "--append-eod", "--log-interval", str(10**9)]
    command += ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", options.tokenizer_model]
    started = time.perf_counter()
    subprocess.run(command, check=True, stderr=subprocess.DEVNULL)
    seconds = time.perf_counter() - started
    # of all that have ended: so this runs in a process that is there for one command
    return 1024 * resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss, seconds


def measure(kind: str, count: int, options: argparse.Namespace) -> tuple[int, float]:
    """`run_tool` on `count` documents, in processes of their own for the file and for the run."""
    with tempfile.TemporaryDirectory(dir=options.scratch) as folder:
        path = in_process(write, kind, folder, count)
        return tuple(in_process(run_tool, path, folder, options))


def in_process(function, *arguments):
    """What `function` returns, called in a child; so the memory of one call is not that of another."""
    reading, writing = os.pipe()
    if (child := os.fork()) == 0:
        os.write(writing, json.dumps(function(*arguments)).encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as file:
        text = file.read()
    os.waitpid(child, 0)
    if not text:
        sys.exit(f"{function.__name__} failed; see above")
    return json.loads(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokenizer-model", required=True, help="tokenizer.json")
    parser.add_argument(
        "--documents", type=int, default=100_000, help="of the small input; the large one has ten times as many"
    )
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=["jsonl", "gz"])
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--scratch", help="folder for inputs and outputs, which are deleted; default: the system's")
    options = parser.parse_args()
    for kind in options.kinds:
        peaks = []
        for count in (options.documents, 10 * options.documents):
            peak, seconds = measure(kind, count, options)
            peaks.append(peak)
            print(
                f"{kind:>8} {count:>10,} documents: peak {peak / 1e6:6.1f} MB, {count / seconds:8,.0f} documents/s",
                flush=True,
            )
        print(f"{kind:>8} ten times the input: {peaks[1] / peaks[0]:.2f} times the memory", flush=True)


if __name__ == "__main__":
    main()
