"""Measure a training step of several checkouts of this project in turns, for example of a change and of its parent.

    git worktree add ../parent COMMIT && bash ../parent/examples/setup_env.sh
    python benchmarks/checkouts.py ../parent . ../parent                      all works; an hour on two quiet cores
    python benchmarks/checkouts.py ../parent . --works tiny fp32 --rounds 3   two of them

The same checkout named twice shows how much of a difference is noise. Each checkout runs the worker of its own
`tools/benchmarking`, by the Python of its own `.venv` if it has one. A turn is as many steps as take --turn seconds, and the order
rotates. Prints for each work and checkout the median milliseconds of a step by the clock and by processor time, and the speed
against the first checkout: the median over the rounds of first / this of the same round; above 1 is faster.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tools.benchmarking.contest import environments  # noqa: E402  needs the path above
from tools.benchmarking.work import MODELS  # noqa: E402  needs the path above

GPT_28M = MODELS["gpt-28m"] | {"global_batch_size": 2}
TINY = MODELS["tiny"] | {"global_batch_size": 4, "micro_batch_size": 4}
TWO_RANKS = GPT_28M | {"micro_batch_size": 1, "ranks": 2}
# name -> (the model and batch, --compile)
WORKS: dict[str, tuple[dict[str, Any], str]] = {
    "tiny": (TINY, "off"),
    "fp32": (GPT_28M, "off"),
    "bf16": (GPT_28M | {"bf16": True}, "off"),
    "fp32-regions": (GPT_28M, "regions"),
    "bf16-regions": (GPT_28M | {"bf16": True}, "regions"),
    "dp": (TWO_RANKS | {"parallel": "dp"}, "off"),
    "zero3": (TWO_RANKS | {"parallel": "zero3"}, "off"),
}


class Checkout:
    """Workers of one checkout for one work, one for each rank."""

    def __init__(self, folder: Path, work: str):
        settings, compiled = WORKS[work]
        contender = {"library": "ours", "compile": compiled}
        python = folder / ".venv" / "bin" / "python"
        program = str(python) if python.exists() else sys.executable
        command = [program, "-m", "tools.benchmarking.worker", json.dumps(contender), "cpu", json.dumps(settings)]
        self.ranks = [
            subprocess.Popen(
                command,
                cwd=folder,
                text=True,
                env=os.environ | env,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
            )
            for env in environments(settings.get("ranks", 1))
        ]
        self.read()

    def read(self) -> list[Any]:
        answers = []
        for rank in self.ranks:
            line = rank.stdout.readline()
            if not line:
                raise SystemExit(f"a worker ended with exit status {rank.wait()}: {' '.join(rank.args)}")
            answers.append(json.loads(line))
        return answers

    def steps(self, number: int) -> tuple[float, float]:
        """Train `number` steps. Returns the seconds of a step by the clock and by processor time, of all ranks together."""
        for rank in self.ranks:
            print(f"step {number}", file=rank.stdin, flush=True)
        answers = self.read()
        return max(answer["seconds"] for answer in answers), sum(answer["cpu_seconds"] for answer in answers)

    def close(self) -> None:
        for rank in self.ranks:
            rank.kill()
            rank.communicate()


def measure(folders: list[Path], work: str, rounds: int, turn: float) -> list[list[tuple[float, float]]]:
    """Return the measurements of each checkout, one a round."""
    checkouts = [Checkout(folder, work) for folder in folders]
    try:
        for checkout in checkouts:
            checkout.steps(2)  # the first one compiles
        slowest = max(checkout.steps(1)[0] for checkout in checkouts)
        number = max(1, round(turn / slowest))
        measurements: list[list[tuple[float, float]]] = [[] for _ in checkouts]
        for turn_index in range(rounds):
            for offset in range(len(checkouts)):
                index = (turn_index + offset) % len(checkouts)
                measurements[index].append(checkouts[index].steps(number))
        return measurements
    finally:
        for checkout in checkouts:
            checkout.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+", type=Path, help="checkouts; the first one is compared with")
    parser.add_argument("--works", nargs="+", choices=WORKS, default=list(WORKS))
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--turn", type=float, default=2.0, metavar="SECONDS")
    options = parser.parse_args()
    for work in options.works:
        started = time.monotonic()
        folders = [folder.resolve() for folder in options.folders]
        measurements = measure(folders, work, options.rounds, options.turn)
        for index, rows in enumerate(measurements):
            speeds = []
            for column in (0, 1):
                pairs = zip(measurements[0], rows, strict=True)
                speeds.append(statistics.median(first[column] / own[column] for first, own in pairs))
            clock, cpu = (1000 * statistics.median(row[column] for row in rows) for column in (0, 1))
            print(
                f"{work:14} {options.folders[index]!s:24} {clock:9.2f} ms {cpu:9.2f} cpu ms   "
                f"speed {speeds[0]:.3f}   by processor time {speeds[1]:.3f}",
                flush=True,
            )
        print(f"{work:14} {options.rounds} rounds in {time.monotonic() - started:.0f} s", flush=True)


if __name__ == "__main__":
    main()
