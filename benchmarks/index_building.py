"""Time and memory of building GPT indices here and with megatron-core's compiled helper, side by side.

    MEGATRON_CORE_PATH=FOLDER python benchmarks/index_building.py --samples 10000000

FOLDER: see tests/compat/test_megatron_core.py; without it our own figures are printed alone. Each build is a process of
its own, ours and theirs in turn; the medians and their ratio are printed. Seconds are of the processor: all is one thread. The other side runs the same three steps: numpy's
shuffles, and the helper that walks from document to document. Peak memory is that of the build, less what the process had.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time

import numpy as np

MEAN_LENGTH, SEQ_LENGTH, SEED = 700, 1024, 1234


def document_lengths(samples: int, epochs: int) -> np.ndarray:
    """Documents of about 700 tokens that give `samples` samples of 1024 tokens in `epochs` epochs."""
    count = samples * SEQ_LENGTH // (MEAN_LENGTH * epochs)
    return np.random.RandomState(0).geometric(1 / MEAN_LENGTH, count).astype(np.int32)


def build_here(lengths: np.ndarray, samples: int) -> int:
    """Bytes of the arrays that megatron.core.datasets.index_map builds."""
    from megatron.core.datasets.index_map import IndexRequest, build_indices

    request = IndexRequest((0, len(lengths)), samples, SEQ_LENGTH, SEED)
    return sum(array.nbytes for array in build_indices(lengths, request))


def build_there(lengths: np.ndarray, samples: int) -> int:
    """The same arrays from numpy and the compiled helper of megatron-core. The final epoch is never separate here."""
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
    """Bytes of this process now (VmRSS) or at its worst since the last reset (VmHWM), as Linux counts them."""
    with open("/proc/self/status") as status:
        return next(1024 * int(line.split()[1]) for line in status if line.startswith(field))


def reset_worst_memory() -> None:
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")


def build_once(side: str, samples: int, epochs: int) -> None:
    """In a process of its own: build, and print seconds, bytes written and bytes of memory as JSON."""
    if side == "there":
        here = [p for p in sys.path if os.path.exists(os.path.join(p or ".", "megatron", "__init__.py"))]
        sys.path[:] = [os.environ["MEGATRON_CORE_PATH"]] + [p for p in sys.path if p not in here]
    build = build_here if side == "here" else build_there
    build(document_lengths(1000, 1), 500)  # imports and first calls are no part of the time
    lengths = document_lengths(samples, epochs)
    reset_worst_memory()
    before, start = memory("VmRSS"), time.process_time()
    written = build(lengths, samples)
    seconds = time.process_time() - start
    print(json.dumps({"seconds": seconds, "written": written, "peak": memory("VmHWM") - before}))


def measure(side: str, samples: int, epochs: int) -> dict[str, float]:
    arguments = [sys.executable, "-W", "ignore", __file__, "--samples", str(samples), "--epochs", str(epochs)]
    done = subprocess.run([*arguments, "--side", side], stdout=subprocess.PIPE, check=True, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def compare(samples: int, epochs: int, runs: int) -> None:
    sides = ["here", "there"] if "MEGATRON_CORE_PATH" in os.environ else ["here"]
    results: dict[str, list[dict]] = {side: [] for side in sides}
    for _ in range(runs):
        for side in sides:
            results[side].append(measure(side, samples, epochs))
    print(f"{samples:,} samples in {epochs} epochs, medians of {runs} runs")
    medians = {}
    for side in sides:
        seconds, written, peak = (
            statistics.median(r[k] for r in results[side]) for k in ("seconds", "written", "peak")
        )
        medians[side] = seconds
        name = "megatron.core.datasets" if side == "here" else "megatron-core's helper"
        print(
            f"  {name:<24} {seconds:8.2f} s   {written / 1e6:8.0f} MB written   peak memory {peak / written:5.2f} x that"
        )
    if len(sides) == 2:
        print(f"  time here / time there   {medians['here'] / medians['there']:8.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description="time and memory of building GPT indices, side by side")
    parser.add_argument("--samples", type=int, default=10_000_000)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--side", choices=["here", "there"], help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.side:
        build_once(args.side, args.samples, args.epochs)
    else:
        compare(args.samples, args.epochs, args.runs)


if __name__ == "__main__":
    main()
