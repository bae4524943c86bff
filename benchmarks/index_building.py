"""Measure time and memory of building GPT indices here and with megatron-core's compiled helper, side by side.

    MEGATRON_CORE_PATH=FOLDER python benchmarks/index_building.py --samples 10000000
    python benchmarks/index_building.py --samples 100000000 --mean-length 7000 --open

FOLDER: see tests/compat/test_megatron_core.py; without it our own figures are printed alone. Each build is a process of
its own, here and there in turn; medians are printed, and their ratio with the smallest and the largest of a round. All is one
thread, so processor time equals the time by the clock on a quiet machine. The other side runs the same three steps: numpy's
shuffles, and the helper that walks from document to document. Peak memory is that of the build, less what the process had
before.

--open instead: a data set of so many samples is built once into a cache (8 bytes a sample and 4 a document, and an index of
20 bytes a document beside tokens that take no space), then opened by one process after the other.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import types

import numpy as np

SEQ_LENGTH = 1024
SEED = 1234


def document_lengths(samples: int, epochs: int, mean: int) -> np.ndarray:
    """Draw document lengths, `mean` tokens on average, for `samples` samples of 1024 tokens in `epochs` epochs."""
    count = samples * SEQ_LENGTH // (mean * epochs)
    count += int(4 * count**0.5)  # a margin, so that a random shortage of tokens does not cause one more epoch
    return np.random.RandomState(0).geometric(1 / mean, count).astype(np.int32)


def build_here(lengths: np.ndarray, samples: int) -> int:
    """Build the arrays of megatron.core.datasets.index_map; return their bytes."""
    from megatron.core.datasets.index_map import IndexRequest, build_indices

    request = IndexRequest((0, len(lengths)), samples, SEQ_LENGTH, SEED)
    return sum(array.nbytes for array in build_indices(lengths, request))


def build_there(lengths: np.ndarray, samples: int) -> int:
    """Build the same arrays with numpy and the compiled helper of megatron-core; return their bytes.

    The final epoch is never separate here.
    """
    from megatron.core.datasets import helpers

    tokens = int(lengths.sum(dtype=np.int64))
    epochs = -(-(samples * SEQ_LENGTH + 1) // tokens)
    rng = np.random.RandomState(SEED)
    documents = np.mgrid[0:epochs, 0 : len(lengths)][1].reshape(-1).astype(np.int32)
    rng.shuffle(documents)
    rows = helpers.build_sample_idx(lengths, documents, SEQ_LENGTH, epochs, tokens, True, 1)
    order = np.arange(len(rows) - 1, dtype=np.uint32)
    rng.shuffle(order)
    return documents.nbytes + rows.nbytes + order.nbytes


def memory(field: str) -> int:
    """Return the resident bytes of this process now (VmRSS) or their peak since the last reset (VmHWM). Linux."""
    with open("/proc/self/status") as status:
        return next(1024 * int(line.split()[1]) for line in status if line.startswith(field))


def reset_peak_memory() -> None:
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")


def build_once(options: argparse.Namespace) -> dict[str, float]:
    """Build once in this process, which does nothing else; return seconds, bytes written and peak bytes of memory."""
    if options.side == "there":
        # replace our package by megatron-core on the path
        ours = [p for p in sys.path if os.path.exists(os.path.join(p or ".", "megatron", "__init__.py"))]
        sys.path[:] = [os.environ["MEGATRON_CORE_PATH"]] + [p for p in sys.path if p not in ours]
    build = build_here if options.side == "here" else build_there
    build(document_lengths(1000, 1, 700), 500)  # a small build first: imports and first calls are not measured
    lengths = document_lengths(options.samples, options.epochs, options.mean_length)
    reset_peak_memory()
    memory_before = memory("VmRSS")
    start = time.perf_counter()
    cpu_start = time.process_time()
    written = build(lengths, options.samples)
    seconds = time.perf_counter() - start
    cpu_seconds = time.process_time() - cpu_start
    return {"seconds": seconds, "cpu": cpu_seconds, "written": written, "peak": memory("VmHWM") - memory_before}


def write_token_file(prefix: str, lengths: np.ndarray) -> None:
    """Write PREFIX.idx like preprocessing, with one sequence a document, and a sparse PREFIX.bin of zeros."""
    from megatron.core.datasets.mmap_indexed_dataset import HEADER, MAGIC, VERSION

    ends = np.cumsum(2 * lengths.astype(np.int64))
    with open(f"{prefix}.idx", "wb") as index:
        index.write(HEADER.pack(MAGIC, VERSION, 8, len(lengths), len(lengths) + 1))
        for array in (lengths, ends - 2 * lengths, np.arange(len(lengths) + 1)):
            array.tofile(index)
    with open(f"{prefix}.bin", "wb") as tokens:
        tokens.truncate(int(ends[-1]))


def open_once(options: argparse.Namespace) -> dict[str, float]:
    """Return the seconds until the data set in `options.folder` can be read. The first call writes and builds it."""
    from megatron.core.datasets import DataConfig, build_gpt_datasets

    prefix = f"{options.folder}/x"
    if not os.path.exists(f"{prefix}.bin"):
        write_token_file(prefix, document_lengths(options.samples, options.epochs, options.mean_length))
    config = DataConfig(data_path=[prefix], split="1", seq_length=SEQ_LENGTH, data_cache_path=f"{options.folder}/cache")
    tokenizer = types.SimpleNamespace(vocab_size=50257, eod=50256, pad=None)
    start = time.perf_counter()
    cpu_start = time.process_time()
    train, _, _ = build_gpt_datasets(config, tokenizer, [options.samples, 0, 0], SEED)
    train[len(train) // 2]
    seconds = time.perf_counter() - start
    cpu_seconds = time.process_time() - cpu_start
    return {"seconds": seconds, "cpu": cpu_seconds, "samples": len(train)}


def run_alone(options: argparse.Namespace, *extra: str) -> dict[str, float]:
    """Return the result of `build_once` or `open_once` in a process of its own."""
    sizes = ["--samples", options.samples, "--epochs", options.epochs, "--mean-length", options.mean_length]
    command = [sys.executable, "-W", "ignore", __file__, *map(str, sizes), *extra]
    result = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True)
    return json.loads(result.stdout.splitlines()[-1])


def compare_builds(options: argparse.Namespace) -> None:
    """Build here and there in turns, and print medians and ratios."""
    sides = ["here", "there"] if "MEGATRON_CORE_PATH" in os.environ else ["here"]
    results: dict[str, list[dict]] = {side: [] for side in sides}
    for _ in range(options.runs):
        for side in sides:
            results[side].append(run_alone(options, "--side", side))
    print(f"{options.samples:,} samples in {options.epochs} epochs, medians of {options.runs} runs")
    for side, name in zip(sides, ("megatron.core.datasets", "megatron-core's helper")):
        seconds, cpu, written, peak = (
            statistics.median(run[k] for run in results[side]) for k in ("seconds", "cpu", "written", "peak")
        )
        times = f"{seconds:8.2f} s by the clock {cpu:8.2f} s of the processor"
        print(f"  {name:<24} {times}   {written / 1e6:6.0f} MB written   peak memory {peak / written:5.2f} x that")
    if len(sides) == 1:
        return
    for kind, label in (("seconds", "by the clock"), ("cpu", "of the processor")):
        ratios = [here[kind] / there[kind] for here, there in zip(results["here"], results["there"])]
        print(f"  here / there, {label}: {statistics.median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f})")


def time_opening(options: argparse.Namespace) -> None:
    """Build a data set, open it in one process after the other, and print medians."""
    with tempfile.TemporaryDirectory(dir=options.scratch) as folder:
        built, *opened = (run_alone(options, "--open", "--folder", folder) for _ in range(options.runs + 1))
    seconds, cpu = (statistics.median(run[k] for run in opened) for k in ("seconds", "cpu"))
    print(f"{built['samples']:,} samples: built and written in {built['seconds']:.1f} s")
    print(
        f"  opened, first sample read: {seconds:.2f} s by the clock, {cpu:.2f} s of the processor, medians of {len(opened)}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=10_000_000)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--mean-length", type=int, default=700, help="tokens of a document")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--open", action="store_true", help="time the opening of a data set that is built")
    parser.add_argument("--scratch", help="folder for that data set, which is deleted; default: the system's")
    parser.add_argument("--side", choices=["here", "there"], help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side or options.folder:
        print(json.dumps(build_once(options) if options.side else open_once(options)))
    elif options.open:
        time_opening(options)
    else:
        compare_builds(options)


if __name__ == "__main__":
    main()
