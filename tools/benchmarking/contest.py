"""Run contenders in turns, so that noise affects all alike. Each is a process, or one for each rank.

turn 1     ours  plain  transformers        turn 2     transformers  plain  ours        the order reverses every turn
"""

import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from megatron.console_scripts import programs_folder
from tools.benchmarking.work import Contender, Work

ROOT = programs_folder()
_MAX_OVER_RANKS = ("seconds", "cpu_seconds", "process_seconds", "peak_bytes")
TURN = 0.5  # minimum seconds of a turn of the slowest contender; a turn of many short steps is less noisy


class Stopped(ChildProcessError):
    """A contender's process ended before it answered; the message is the end of its stderr."""


class Process:
    """The processes of one contender, one for each rank. name: a contender, or "ceilings"."""

    def __init__(self, name: Contender | str, device: str, work: Work):
        contender = name if isinstance(name, str) else json.dumps(asdict(name))
        command = [sys.executable, "-m", "tools.benchmarking.worker", contender, device, json.dumps(asdict(work))]
        self.ranks = [_Rank(command, env) for env in environments(work.ranks)]

    def answer(self) -> Any:
        """Read the answer of every rank and return one: the maximum over the ranks for the numbers of a step.

        A loss is that of the first rank that has it: in a pipeline only the last stage does.
        """
        answers = [rank.answer() for rank in self.ranks]
        if isinstance(answers[0], dict):
            merged = dict(answers[0])
            for name in _MAX_OVER_RANKS:
                if name in merged:
                    merged[name] = max(answer[name] for answer in answers)
            return merged
        return next((answer for answer in answers if answer is not None), None)

    def ask(self, request: str) -> Any:
        """Send a line of the worker's protocol to every rank; return the answer."""
        for rank in self.ranks:
            with contextlib.suppress(BrokenPipeError):  # answer() raises with the reason
                print(request, file=rank.process.stdin, flush=True)
        return self.answer()

    def close(self) -> None:
        for rank in self.ranks:
            rank.close()


class _Rank:
    def __init__(self, command: list[str], env: dict[str, str]):
        self.errors = tempfile.TemporaryFile("w+")  # noqa: SIM115  a pipe would fill up and block the process
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": self.errors}
        self.process = subprocess.Popen(command, cwd=ROOT, text=True, env=os.environ | env, **pipes)

    def answer(self) -> Any:
        line = self.process.stdout.readline()
        if not line:
            status = self.process.wait()
            self.errors.seek(0)
            last_lines = self.errors.read().strip().splitlines()[-3:]
            raise Stopped("\n".join(last_lines) or f"exit status {status}")
        return json.loads(line)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        with contextlib.suppress(BrokenPipeError):
            self.process.communicate()
        self.errors.close()


def environments(ranks: int) -> list[dict[str, str]]:
    """Return the environment of each rank. It has an equal share of the cores, unless OMP_NUM_THREADS is set."""
    if ranks == 1:
        return [{}]
    cores = os.cpu_count() or 1
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    shared = {
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(max(1, cores // ranks))),
    }
    return [shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)]


def ceilings(device: str) -> dict[str, float]:
    """Measure the limits of the device in a process of its own."""
    with contextlib.closing(Process("ceilings", device, Work(1, 1, 1))) as process:
        return process.answer()


@dataclass(frozen=True)
class Plan:
    """Length of a contest."""

    rounds: int  # turns of each contender
    warmup: int  # unmeasured steps
    steps: int | None = None  # of a turn; None: as many as take `TURN` seconds
    until: float = float("inf")  # no turn begins later, by `time.monotonic()`
    profile: bool = False


class Contest:
    """Contenders side by side at one work. All results are by the title of a contender."""

    def __init__(self, contenders: list[Contender], work: Work, device: str, plan: Plan):
        self.contenders = {contender.title(work.parallel): contender for contender in contenders}
        self.work = work
        self.device = device
        self.plan = plan
        self.steps: dict[str, list[dict[str, Any]]] = {}  # measurements of each turn
        self.about: dict[str, dict[str, Any]] = {}  # device, threads, losses
        self.failed: dict[str, str] = {}  # why a peer is not measured
        self.operators: list[dict[str, Any]] = []

    def run(self) -> None:
        """Measure all contenders. Raises `Stopped` if one of ours ends, ValueError if they train different models."""
        with contextlib.ExitStack() as processes:
            running = dict(self._start(processes))
            check_threads(self.about)
            check_losses({title: self.about[title] for title in running if self._is_same_model(title)}, self.work)
            num_steps = self.plan.steps or self._steps_of_a_turn()
            self.steps = {title: [] for title in running}
            for turn in range(self.plan.rounds):
                if turn and time.monotonic() > self.plan.until:
                    break
                titles = list(running) if turn % 2 == 0 else list(reversed(running))
                for title in titles:
                    self.steps[title].append(running[title].ask(f"step {num_steps}"))
            if self.plan.profile:
                first_title = next(iter(running))
                self.operators = running[first_title].ask("profile")

    def _is_same_model(self, title: str) -> bool:
        """Whether the losses of a contender can be compared. transformers' BERT has its norms after the blocks."""
        return not (self.contenders[title].library == "transformers" and self.work.family == "bert")

    def _start(self, processes: contextlib.ExitStack) -> Iterator[tuple[str, Process]]:
        """Start and warm up the contenders; yield (title, process) of those that run."""
        for title, contender in self.contenders.items():
            start = time.monotonic()
            process = processes.enter_context(contextlib.closing(Process(contender, self.device, self.work)))
            try:
                self.about[title] = process.answer() | self._warm_up(process, start)
            except Stopped as error:
                if contender.is_ours:
                    raise Stopped(f"{title}: {error}") from None
                self.about.pop(title, None)
                self.failed[title] = str(error)
                process.close()
                continue
            yield title, process

    def _warm_up(self, process: Process, start: float) -> dict[str, Any]:
        """Train the unmeasured steps, of which the first compiles; then let the peak of memory begin anew."""
        loss_before = process.ask("loss")
        first_steps = []
        start_seconds = 0.0
        for number in range(self.plan.warmup):
            first_steps.append(process.ask("step"))
            if number == 0:
                start_seconds = time.monotonic() - start
        loss_after = process.ask("loss")
        process.ask("measure")
        return {
            "loss_before": loss_before,
            "loss_after": loss_after,
            "first_seconds": [step["seconds"] for step in first_steps],
            "start_seconds": start_seconds,
            "start_cpu_seconds": first_steps[0]["process_seconds"] if first_steps else 0.0,
        }

    def _steps_of_a_turn(self) -> int:
        """Return how many steps of the slowest contender take `TURN` seconds."""
        step_seconds = [about["first_seconds"][-1] for about in self.about.values() if about["first_seconds"]]
        slowest = max(step_seconds, default=TURN)
        return max(1, round(TURN / slowest))


def check_threads(about: dict[str, dict[str, Any]]) -> None:
    """Raise ValueError unless all contenders have the same number of threads."""
    threads = {title: info["threads"] for title, info in about.items()}
    if len(set(threads.values())) > 1:
        raise ValueError(f"contenders have different numbers of threads ({threads}); set OMP_NUM_THREADS")


# is half precision -> relative differences of losses, before any step and after the warm-up. In half precision
# contenders round in different places. AdamW's first steps have the size of the learning rate whatever the gradient, so
# rounding grows.
TOLERANCES = {False: (1e-5, 1e-3), True: (2e-3, 1e-2)}

WITH_DROPOUT = 2e-2  # after the warm-up, in which each contender has other masks: seeds of one contender differ by 4e-3


def check_losses(about: dict[str, dict[str, Any]], work: Work) -> None:
    """Raise ValueError unless all losses of the first batch without dropout agree, before and after the first steps."""
    if not about:
        return
    tolerance_before, tolerance_after = TOLERANCES[work.bf16 or work.fp16]
    if work.has_dropout:
        tolerance_after = WITH_DROPOUT
    for key, moment, tolerance in (
        ("loss_before", "before the first step", tolerance_before),
        ("loss_after", "after the warm-up", tolerance_after),
    ):
        losses = {title: info[key] for title, info in about.items()}
        smallest = min(losses.values())
        agrees = max(losses.values()) - smallest <= tolerance * smallest  # False for NaN
        if not agrees:
            listed = ", ".join(f"{title} {loss:.6f}" for title, loss in losses.items())
            raise ValueError(f"the contenders do not train the same model: losses {moment}: {listed}")


def summary(steps: list[dict[str, Any]]) -> dict[str, Any]:
    """Return medians over the rounds, and the seconds of every round. steps: the measurements of each turn."""
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
    """Return our speedup over a peer: median, smallest and largest ratio of a round. Inputs: seconds of each round."""
    ratios = [peer_seconds / our_seconds for our_seconds, peer_seconds in zip(ours, peer)]
    return median(ratios), min(ratios), max(ratios)
