"""What half precision costs on a CPU: a training step with --bf16 or --fp16 against the same step in float32, in one run.

    python benchmarks/half_precision.py                                  27.6 million parameters, a step of 2 x 512 tokens
    python benchmarks/half_precision.py --mask avx512 --native           as on a CPU that has AVX-512 without bfloat16
    python benchmarks/half_precision.py --mask avx2 --rounds 15          as on one that has no AVX-512 either

Each contender is a process that stays alive and trains the same model by the code of a run (`tools/benchmarking`); they take a step in
turns, and the order turns round. --mask keeps the libraries of all of them from instructions that the CPU has: oneDNN's and torch's own
kernels by ONEDNN_MAX_CPU_ISA and ATEN_CPU_CAPABILITY. Prints seconds a step and of processor time (median, fastest, slowest), and
ratios of medians to float32's, with the least and the largest of a round: above 1 float32 is faster.
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
    work = Work(
        options.layers,
        options.hidden,
        options.hidden // 64,
        options.vocab,
        options.sequence,
        options.batch,
        options.batch,
    )
    found = {"float32": work}
    for name in options.precisions:
        found[name] = replace(work, **{name: True})
        if options.native:
            found[f"{name}, native"] = replace(found[name], cpu_half_products="native")
    return found


def measure(works: dict[str, Work], rounds: int) -> dict[str, list[dict]]:
    """Of each contender, what it says of its steps."""
    running = {name: Process(OURS, "cpu", work) for name, work in works.items()}
    try:
        for process in running.values():
            process.answer()
            process.ask("step")
        steps: dict[str, list[dict]] = {name: [] for name in works}
        for turn in range(rounds):
            for name in list(works)[:: 1 if turn % 2 == 0 else -1]:
                steps[name].append(running[name].ask("step"))
        return steps
    finally:
        for process in running.values():
            process.close()


def table(works: dict[str, Work], steps: dict[str, list[dict]]) -> list[str]:
    columns, lines = ("median", "fastest", "slowest"), []
    lines.append(f"{'':16}{'s a step':>27}   {'of processor time':>27}")
    lines.append(f"{'':16}" + 2 * ("".join(f" {name:>8}" for name in columns) + "   "))
    taken = {
        kind: {name: [step[kind] for step in of] for name, of in steps.items()} for kind in ("seconds", "cpu_seconds")
    }
    for name in works:
        cells = [
            "".join(f" {value:8.3f}" for value in (statistics.median(of[name]), min(of[name]), max(of[name])))
            for of in taken.values()
        ]
        lines.append(f"{name:16}" + "   ".join(cells))
    for name in list(works)[1:]:
        by_wall, by_cpu = (slower(of[name], of["float32"]) for of in taken.values())
        lines.append(f"{name} / float32: {by_wall}; by processor time {by_cpu}")
    return lines


def slower(mine: list[float], other: list[float]) -> str:
    ratios = [a / b for a, b in zip(mine, other)]
    return f"{statistics.median(mine) / statistics.median(other):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"


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
