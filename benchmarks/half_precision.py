"""Measure half precision on a CPU: a training step with --bf16 or --fp16 against the same step in float32, in one run.

    python benchmarks/half_precision.py                                  27.6 million parameters, a step of 2 x 512 tokens
    python benchmarks/half_precision.py --mask avx512 --native           as on a CPU that has AVX-512 without bfloat16
    python benchmarks/half_precision.py --mask avx2 --rounds 15          as on one that has no AVX-512 either

Each contender is a process that trains the same model by the code of a run (`tools/benchmarking`). They train a step in turns,
and the order reverses every turn. --mask hides instructions of the CPU from the libraries of all contenders: from oneDNN's and
torch's own kernels by ONEDNN_MAX_CPU_ISA and ATEN_CPU_CAPABILITY. Prints seconds a step by the clock and by processor time
(median, fastest, slowest), and ratios of medians to float32's, with the smallest and the largest of a round: above 1 float32 is
faster.
"""

import argparse
import os
import statistics
import sys
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tools.benchmarking.contest import Process
from tools.benchmarking.records import cpu_name
from tools.benchmarking.work import OURS, Work

MASKS = {
    "none": {},
    "avx512": {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_VNNI"},
    "avx2": {"ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2"},
}


def contenders(options: argparse.Namespace) -> dict[str, Work]:
    """Return the work of each contender, by its name."""
    work = Work(
        options.layers,
        options.hidden,
        options.hidden // 64,
        options.vocab,
        options.sequence,
        options.batch,
        options.batch,
    )
    works = {"float32": work}
    for name in options.precisions:
        works[name] = replace(work, **{name: True})
        if options.native:
            works[f"{name}, native"] = replace(works[name], cpu_half_products="native")
    return works


def measure(works: dict[str, Work], rounds: int) -> dict[str, list[dict]]:
    """Return the measurements of each contender's steps."""
    running = {name: Process(OURS, "cpu", work) for name, work in works.items()}
    try:
        for process in running.values():
            process.answer()
            process.ask("step")
        steps: dict[str, list[dict]] = {name: [] for name in works}
        for turn in range(rounds):
            names = list(works) if turn % 2 == 0 else list(reversed(works))
            for name in names:
                steps[name].append(running[name].ask("step"))
        return steps
    finally:
        for process in running.values():
            process.close()


def table(works: dict[str, Work], steps: dict[str, list[dict]]) -> list[str]:
    """Return the lines of the table of seconds, and of the ratios to float32."""
    columns = "".join(f" {name:>8}" for name in ("median", "fastest", "slowest"))
    lines = [f"{'':16}{'s a step':>27}   {'of processor time':>27}", f"{'':16}{columns}   {columns}   "]
    seconds = {name: [step["seconds"] for step in steps_of_name] for name, steps_of_name in steps.items()}
    cpu_seconds = {name: [step["cpu_seconds"] for step in steps_of_name] for name, steps_of_name in steps.items()}
    for name in works:
        lines.append(f"{name:16}{median_and_range(seconds[name])}   {median_and_range(cpu_seconds[name])}")
    for name in list(works)[1:]:
        by_clock = ratio_of_medians(seconds[name], seconds["float32"])
        by_cpu = ratio_of_medians(cpu_seconds[name], cpu_seconds["float32"])
        lines.append(f"{name} / float32: {by_clock}; by processor time {by_cpu}")
    return lines


def median_and_range(numbers: list[float]) -> str:
    return "".join(f" {value:8.3f}" for value in (statistics.median(numbers), min(numbers), max(numbers)))


def ratio_of_medians(numbers: list[float], base: list[float]) -> str:
    """Return the ratio of medians, with the range of the ratios of rounds."""
    ratios = [a / b for a, b in zip(numbers, base)]
    return f"{statistics.median(numbers) / statistics.median(base):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mask", choices=MASKS, default="none", help="instructions to do without")
    parser.add_argument("--precisions", nargs="+", choices=("bf16", "fp16"), default=["bf16"])
    parser.add_argument("--native", action="store_true", help="also with --cpu-half-products native")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--vocab", type=int, default=4096)
    parser.add_argument("--sequence", type=int, default=512)
    parser.add_argument("--batch", type=int, default=2, help="samples of a step")
    parser.add_argument("--rounds", type=int, default=9, help="measured steps of each contender, after one that is not")
    options = parser.parse_args()
    os.environ.update(MASKS[options.mask])
    works = contenders(options)
    work = works["float32"]
    masks = " ".join(f"{name}={value}" for name, value in MASKS[options.mask].items())
    print(f"{cpu_name()}; {masks or 'nothing masked'}")
    print(
        f"{work.parameters:,} parameters, {options.batch} x {options.sequence} tokens a step, {options.rounds} rounds"
    )
    print("\n".join(table(works, measure(works, options.rounds))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
