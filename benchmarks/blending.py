"""Measure how fast a blend chooses the data set of each sample, here and in megatron-core's compiled helper.

    MEGATRON_CORE_PATH=FOLDER python benchmarks/blending.py --datasets 5 1000 --samples 10000000

FOLDER: see tests/compat/test_megatron_core.py; without it our own figures are printed alone. The weights are drawn at random. Prints
microseconds a sample, by the clock and by processor time, as medians of the rounds, and their ratio with the least and
the largest of a round; and whether both made the same choices. --simple adds a loop over samples in Python, and one of
numpy calls: what the product's walk in lanes is worth.
"""

import argparse
import glob
import importlib.util
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron.core.datasets.blending_indices_and_dataset import normalized, weighted_indices


def compiled_helper() -> Callable[[list[float], int], tuple[np.ndarray, np.ndarray]] | None:
    """Return the helper as a function with our signature; None without MEGATRON_CORE_PATH."""
    if "MEGATRON_CORE_PATH" not in os.environ:
        return None
    (path,) = glob.glob(f"{os.environ['MEGATRON_CORE_PATH']}/megatron/core/datasets/helpers_cpp*.so")
    spec = importlib.util.spec_from_file_location("helpers_cpp", path)
    helpers = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(helpers)

    def choose(shares: list[float], size: int) -> tuple[np.ndarray, np.ndarray]:
        dataset_index = np.zeros(size, np.int16)
        sample_index = np.zeros(size, np.int64)
        helpers.build_blending_indices(dataset_index, sample_index, np.array(shares), len(shares), size, False)
        return dataset_index, sample_index

    return choose


def python_loop(shares: list[float], size: int) -> tuple[np.ndarray, np.ndarray]:
    """Choose by comparing every data set's deficit for every sample."""
    counts = [0] * len(shares)
    dataset_index = np.empty(size, np.int16)
    sample_index = np.empty(size, np.int64)
    for i in range(size):
        drawn = max(i, 1)
        best, largest = 0, shares[0] * drawn - counts[0]
        for candidate, share in enumerate(shares):
            deficit = share * drawn - counts[candidate]
            if deficit > largest:
                best, largest = candidate, deficit
        dataset_index[i] = best
        sample_index[i] = counts[best]
        counts[best] += 1
    return dataset_index, sample_index


def numpy_loop(shares: list[float], size: int) -> tuple[np.ndarray, np.ndarray]:
    """The same with the deficits of one sample in an array."""
    weights = np.array(shares)
    counts = np.zeros(len(shares))
    dataset_index = np.empty(size, np.int16)
    sample_index = np.empty(size, np.int64)
    for i in range(size):
        best = int((weights * max(i, 1) - counts).argmax())
        dataset_index[i] = best
        sample_index[i] = counts[best]
        counts[best] += 1
    return dataset_index, sample_index


def timed(
    choose: Callable, shares: list[float], size: int
) -> tuple[tuple[float, float], tuple[np.ndarray, np.ndarray]]:
    """Return ((elapsed, processor) microseconds a sample, the choices)."""
    start = time.perf_counter()
    cpu_start = time.process_time()
    result = choose(shares, size)
    elapsed = time.perf_counter() - start
    cpu = time.process_time() - cpu_start
    return (1e6 * elapsed / size, 1e6 * cpu / size), result


def compare(count: int, size: int, rounds: int, *, simple: bool) -> None:
    """Blend `count` data sets with random weights by each contender in turns, and print their times."""
    shares = normalized(np.random.RandomState(count).rand(count).tolist())
    contenders = {"ours": weighted_indices}
    if simple:
        contenders |= {"Python loop": python_loop, "numpy loop": numpy_loop}
    helper = compiled_helper()
    if helper is not None:
        contenders["helper"] = helper
    spent: dict[str, list[tuple[float, float]]] = {name: [] for name in contenders}
    for _ in range(rounds):
        choices = []
        for name, choose in contenders.items():
            seconds, result = timed(choose, shares, size)
            spent[name].append(seconds)
            choices.append(result)
        if not all(np.array_equal(a, b) for other in choices for a, b in zip(choices[0], other)):
            sys.exit(f"{count} data sets: the choices differ")
    print(f"{count} data sets, {size:,} samples, {rounds} rounds")
    for kind, label in enumerate(("by the clock", "by processor time")):
        medians = {name: statistics.median(times[kind] for times in rounds) for name, rounds in spent.items()}
        line = ", ".join(f"{name} {median:.3f} us a sample" for name, median in medians.items())
        if "helper" in spent:
            ratios = [a[kind] / b[kind] for a, b in zip(spent["ours"], spent["helper"])]
            line += f"; ours / helper {statistics.median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f})"
        print(f"  {label}: {line}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--datasets", type=int, nargs="+", default=[5, 1000], help="how many are blended")
    parser.add_argument("--samples", type=int, default=10_000_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--simple", action="store_true", help="beside loops over samples in Python and numpy")
    options = parser.parse_args()
    for count in options.datasets:
        compare(count, options.samples, options.rounds, simple=options.simple)


if __name__ == "__main__":
    main()
