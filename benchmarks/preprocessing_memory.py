"""Measure the peak memory of tools/preprocess_data.py with an input and with one ten times as long, for every kind of file.

    python benchmarks/preprocessing_memory.py --tokenizer-model tokenizer.json --documents 100000 --kinds jsonl gz zst parquet

The documents are short and random: common words, and a few that no other document has, so that a worker's cache of words
reaches its limit. Prints for each kind of file the peak of the largest process and the documents a second, at `--documents` and
at ten times as many, and the ratio of the two peaks. Linux; zst needs the package zstandard, parquet the package pyarrow.
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
    """Yield `count` texts of about 100 characters in batches, the same in every run."""
    generator = random.Random(0)
    letters = "etaoinshrdlu"
    common_words = ["".join(generator.choices(letters, k=generator.randint(1, 9))) for _ in range(5000)]
    for first in range(0, count, ROWS):
        texts = []
        for _ in range(first, min(first + ROWS, count)):
            words = generator.choices(common_words, k=10)
            words += map(str, generator.choices(range(10**9), k=5))
            texts.append(f"{' '.join(words)}.")
        yield texts


def write_lines(path: str, count: int) -> None:
    """Write JSON lines, compressed as the ending of `path` says."""
    if path.endswith(".zst"):
        import zstandard

        output = zstandard.open(path, "wb")
    elif path.endswith(".gz"):
        output = gzip.open(path, "wb", compresslevel=1)  # noqa: SIM115
    else:
        output = open(path, "wb")  # noqa: SIM115
    with output as file:
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
    """Write a file of this kind; return its path."""
    path = os.path.join(folder, {"gz": "x.jsonl.gz", "zst": "x.jsonl.zst"}.get(kind, f"x.{kind}"))
    if kind == "parquet":
        write_parquet(path, count)
    else:
        write_lines(path, count)
    return path


def run_tool(path: str, folder: str, options: argparse.Namespace) -> tuple[int, float]:
    """Preprocess the file `path`; return (peak bytes of the largest process, seconds)."""
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
    # The maximum over all ended children: so this function must run in a process of its own.
    return 1024 * resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss, seconds


def measure(kind: str, count: int, options: argparse.Namespace) -> tuple[int, float]:
    """Return `run_tool` on `count` documents, with a process for writing the file and one for the run."""
    with tempfile.TemporaryDirectory(dir=options.scratch) as folder:
        path = in_process(write, kind, folder, count)
        return tuple(in_process(run_tool, path, folder, options))


def in_process(function, *arguments):
    """Call `function` in a child process and return its result, so that each call has its own memory."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
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
