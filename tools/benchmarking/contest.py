"""Run contenders in turns, so that noise affects all alike: each is a process, or one a rank, that takes steps on request.

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
_LARGEST = ("seconds", "cpu_seconds", "process_seconds", "peak_bytes")  # of all ranks
TURN = 0.5  # seconds that a turn of the slowest contender takes at least: a step may be much shorter


class Stopped(ChildProcessError):
    """A contender's process ended before it answered; the message is the end of its stderr."""


class Process:
    """The processes of one contender, one a rank. name: a contender, or "ceilings"."""

    def __init__(self, name: Contender | str, device: str, work: Work):
        shown = name if isinstance(name, str) else json.dumps(asdict(name))
        command = [sys.executable, "-m", "tools.benchmarking.worker", shown, device, json.dumps(asdict(work))]
        self.ranks = [_Rank(command, env) for env in _environments(work.ranks)]

    def answer(self) -> Any:
        """The first rank's answer; of numbers of a step the largest of all ranks. A loss is that of a rank that knows it."""
        answers = [rank.answer() for rank in self.ranks]
        if isinstance(answers[0], dict):
            largest = {name for name in _LARGEST if name in answers[0]}
            return answers[0] | {name: max(answer[name] for answer in answers) for name in largest}
        return next((answer for answer in answers if answer is not None), None)

    def ask(self, what: str) -> Any:
        for rank in self.ranks:
            with contextlib.suppress(BrokenPipeError):  # answer() raises with the reason
                print(what, file=rank.process.stdin, flush=True)
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
            raise Stopped("\n".join(self.errors.read().strip().splitlines()[-3:]) or f"exit status {status}")
        return json.loads(line)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        with contextlib.suppress(BrokenPipeError):
            self.process.communicate()
        self.errors.close()


def _environments(ranks: int) -> list[dict[str, str]]:
    """Of each rank, with its share of the cores unless OMP_NUM_THREADS says otherwise."""
    if ranks == 1:
        return [{}]
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    shared = {"WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    shared["OMP_NUM_THREADS"] = os.environ.get("OMP_NUM_THREADS", max(1, cores // ranks))
    given = [shared | {"RANK": rank, "LOCAL_RANK": rank} for rank in range(ranks)]
    return [{name: str(value) for name, value in env.items()} for env in given]


def ceilings(device: str) -> dict[str, float]:
    """The limits of the device, measured by one process."""
    with contextlib.closing(Process("ceilings", device, Work(1, 1, 1))) as process:
        return process.answer()


@dataclass(frozen=True)
class Plan:
    """How long a contest takes. steps: of one turn; None: as many as take `TURN` seconds."""

    rounds: int
    warmup: int
    steps: int | None = None
    until: float = float("inf")  # no turn begins later, by `time.monotonic()`
    profile: bool = False


class Contest:
    """Contenders side by side at one work, by title.

    steps: what each says of its turns. about: device, threads, losses. failed: why a peer is not measured.
    """

    def __init__(self, contenders: list[Contender], work: Work, device: str, plan: Plan):
        self.contenders = {one.title(work.parallel): one for one in contenders}
        self.work, self.device = work, device
        self.plan = plan
        self.steps: dict[str, list[dict[str, Any]]] = {}
        self.about: dict[str, dict[str, Any]] = {}
        self.failed: dict[str, str] = {}
        self.operators: list[dict[str, Any]] = []

    def run(self) -> None:
        """Raises `Stopped` if one of ours ends, and ValueError if contenders do not the same work."""
        with contextlib.ExitStack() as open_ones:
            running = dict(self._start(open_ones))
            check_threads(self.about)
            check_losses({title: self.about[title] for title in running if self._is_same_model(title)}, self.work)
            number = self.plan.steps or self._steps_of_a_turn()
            self.steps = {title: [] for title in running}
            for turn in range(self.plan.rounds):
                if turn and time.monotonic() > self.plan.until:
                    break
                for title in list(running)[:: 1 if turn % 2 == 0 else -1]:
                    self.steps[title].append(running[title].ask(f"step {number}"))
            if self.plan.profile:
                self.operators = running[next(iter(running))].ask("profile")

    def _is_same_model(self, title: str) -> bool:
        """transformers' BERT has its norms after the blocks: another function of other weights, at the same work."""
        return not (self.contenders[title].library == "transformers" and self.work.family == "bert")

    def _start(self, open_ones: contextlib.ExitStack) -> Iterator[tuple[str, Process]]:
        for title, contender in self.contenders.items():
            began = time.monotonic()
            process = open_ones.enter_context(contextlib.closing(Process(contender, self.device, self.work)))
            try:
                self.about[title] = process.answer() | self._warm_up(process, began)
            except Stopped as error:
                if contender.is_ours:
                    raise Stopped(f"{title}: {error}") from None
                self.about.pop(title, None)
                self.failed[title] = str(error)
                process.close()
                continue
            yield title, process

    def _warm_up(self, process: Process, began: float) -> dict[str, Any]:
        """The first steps compile; the peak of memory begins after them."""
        before = process.ask("loss")
        first, start = [], 0.0
        for _ in range(self.plan.warmup):
            first.append(process.ask("step"))
            start = start or time.monotonic() - began
        after = process.ask("loss")
        process.ask("measure")
        return {
            "loss_before": before,
            "loss_after": after,
            "first_seconds": [step["seconds"] for step in first],
            "start_seconds": start,
            "start_cpu_seconds": first[0]["process_seconds"] if first else 0.0,
        }

    def _steps_of_a_turn(self) -> int:
        slowest = max(
            (about["first_seconds"][-1] for about in self.about.values() if about["first_seconds"]), default=TURN
        )
        return max(1, round(TURN / slowest))


def check_threads(about: dict[str, dict[str, Any]]) -> None:
    threads = {title: said["threads"] for title, said in about.items()}
    if len(set(threads.values())) > 1:
        raise ValueError(f"contenders have different numbers of threads ({threads}); set OMP_NUM_THREADS")


# Relative differences of losses, before any step and after the warm-up. Half precision rounds in other places; AdamW's first
# steps have the size of the learning rate whatever the gradient, so rounding grows.
TOLERANCES = {False: (1e-5, 1e-3), True: (2e-3, 1e-2)}

WITH_DROPOUT = 2e-2  # after the warm-up, which each contender trains with masks of its own: seeds of one differ by 4e-3


def check_losses(about: dict[str, dict[str, Any]], work: Work) -> None:
    """ValueError unless all losses of the first batch without dropout agree, before and after the first steps."""
    before, after = TOLERANCES[work.bf16 or work.fp16]
    if work.has_dropout:
        after = WITH_DROPOUT
    for when, tolerance in (("loss_before", before), ("loss_after", after)):
        losses = {title: said[when] for title, said in about.items()}
        if not losses or max(losses.values()) - min(losses.values()) <= tolerance * min(losses.values()):
            continue
        listed = ", ".join(f"{title} {loss:.6f}" for title, loss in losses.items())
        moment = "before the first step" if when == "loss_before" else "after the warm-up"
        raise ValueError(f"the contenders do not train the same model: losses {moment}: {listed}")


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
    """Our speedup over a peer: median, smallest and largest ratio of a round."""
    by_round = [theirs / mine for mine, theirs in zip(ours, peer)]
    return median(by_round), min(by_round), max(by_round)
