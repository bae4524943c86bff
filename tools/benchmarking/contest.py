"""Run contenders in turns: each is a process that takes a step on request, so that noise affects all alike.

round 1     ours  fp32  bf16        round 2     bf16  fp32  ours        the order reverses every round
"""

import contextlib
import json
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

from tools.benchmarking.work import Work

ROOT = Path(__file__).resolve().parent.parent.parent


class Stopped(ChildProcessError):
    """A contender's process ended before it answered; the message is the end of its stderr."""


class Process:
    """The process of one contender."""

    def __init__(self, name: str, device: str, work: Work):
        self.errors = tempfile.TemporaryFile("w+")  # noqa: SIM115  a pipe would fill up and block the process
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tools.benchmarking.worker", name, device, json.dumps(asdict(work))],
            cwd=ROOT,
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors,
        )

    def answer(self) -> Any:
        line = self.process.stdout.readline()
        if not line:
            status = self.process.wait()
            self.errors.seek(0)
            raise Stopped("\n".join(self.errors.read().strip().splitlines()[-3:]) or f"exit status {status}")
        return json.loads(line)

    def ask(self, what: str) -> Any:
        with contextlib.suppress(BrokenPipeError):  # answer() raises with the reason
            print(what, file=self.process.stdin, flush=True)
        return self.answer()

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        with contextlib.suppress(BrokenPipeError):
            self.process.communicate()
        self.errors.close()


def ceilings(device: str, work: Work) -> dict[str, float]:
    with contextlib.closing(Process("ceilings", device, work)) as process:
        return process.answer()


def contest(
    names: list[str], work: Work, device: str, *, rounds: int, warmup: int, profile: bool = False
) -> tuple[dict[str, dict[str, Any]], dict[str, str]]:
    """({contender: measurements}, {contender that failed: reason}). profile: also list our most expensive operators."""
    steps: dict[str, list[dict[str, Any]]] = {}
    failed: dict[str, str] = {}
    running: dict[str, Process] = {}
    about: dict[str, Any] = {}
    try:
        for name in names:
            running[name] = Process(name, device, work)
            try:
                about[name] = running[name].answer()
                for _ in range(warmup):
                    running[name].ask("step")
                steps[name] = []
            except Stopped as error:
                failed[name] = str(error)
                running.pop(name).close()
        for turn in range(rounds):
            for name in list(running) if turn % 2 == 0 else list(running)[::-1]:
                steps[name].append(running[name].ask("step"))
        operators = {name: running[name].ask("profile") for name in running if profile and name == "ours"}
    finally:
        for process in running.values():
            process.close()
    results = {name: {**about[name], **summary(taken)} for name, taken in steps.items()}
    for name, listed in operators.items():
        results[name]["operators"] = listed
    return results, failed


def summary(steps: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians over the rounds, and the seconds of every round."""
    names = sorted({name for step in steps for name in step["phases"]})
    return {
        "seconds": median(step["seconds"] for step in steps),
        "cpu_seconds": median(step["cpu_seconds"] for step in steps),
        "all_seconds": [step["seconds"] for step in steps],
        "all_cpu_seconds": [step["cpu_seconds"] for step in steps],
        "phases": {name: median(step["phases"].get(name, 0.0) for step in steps) for name in names},
        "peak_bytes": max(step["peak_bytes"] for step in steps),
    }


def ratio(ours: list[float], peer: list[float]) -> tuple[float, float, float]:
    """Our speedup over a peer: (ratio of medians, smallest and largest ratio of a round)."""
    by_round = [theirs / mine for mine, theirs in zip(ours, peer)]
    return median(peer) / median(ours), min(by_round), max(by_round)
