"""Measure the cost of the checks that are on by default: each is switched off in every other turn of one process.

    python benchmarks/default_checks.py                  a GPT of 5.3 M parameters, 2 microbatches of 256 tokens
    python benchmarks/default_checks.py --turns 40 --steps 3
    python benchmarks/default_checks.py --alone          beside other work: the checks' own calls, timed alone

    finite    NaN and infinity in losses and gradients (off: --no-check-for-nan-in-loss-and-grad)
    rerun     a cache of the step's batches, to rerun it after bad numbers (off: --rerun-mode disabled)
    hangs     detection of ranks that hang (off: --hang-timeout 0)

A turn is `--steps` steps of the loop with all of them, then as many with one of them off, in an order that turns round. Prints for each
check the median over the turns of the difference of processor time, of all threads, and of wall time, in milliseconds a step and as a
share of a step; beside it the interval that holds the median with 95 % (order statistics). Run it on a machine that does nothing else.

`--alone` needs no quiet machine: it takes the arguments of each check's calls from a step, repeats the calls 30 times 1,000 in processor time
of the thread, and divides by the shortest of 20 steps in processor time of the process. Its bound takes the slowest of the 30. The watch's
notes are those of `--calls` collectives a step, and its look at the threads of this process is once in a second of processor time.
"""

import argparse
import contextlib
import itertools
import math
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

import pretrain_gpt
from megatron.core.base import rank_status
from megatron.training import step as train_step
from megatron.training.fault_tolerance import hang_watch
from megatron.training.initialize import initialize_megatron
from megatron.training.rewindable_batches import RewindableBatches
from megatron.training.trainer import Trainer

FLAGS = (
    "--num-layers 4 --hidden-size 256 --num-attention-heads 4 --seq-length 256 --micro-batch-size 1 --global-batch-size 2 "
    "--lr 1e-4 --train-iters 1000000 --eval-iters 0 --log-interval 1000000 --mock-data --tokenizer-type NullTokenizer "
    "--vocab-size 8000 --device cpu"
)
CHECKS = ("finite", "rerun", "hangs")


class Run:
    """A trainer whose default checks can be switched off one by one."""

    def __init__(self, flags: str):
        with contextlib.redirect_stdout(None):
            runtime = initialize_megatron(argv=flags.split())
            self.trainer = Trainer(
                runtime,
                pretrain_gpt.train_valid_test_datasets_provider,
                pretrain_gpt.model_provider,
                pretrain_gpt.forward_step,
            )
        self.config = self.trainer.config
        self.kept = self.trainer.training_data()
        self.plain = self.trainer._iterators("train", self.trainer.datasets["train"], 0)
        self.keeps = list(self.trainer.guard._kept)

    def turn(self, without: str | None, steps: int) -> tuple[float, float]:
        """Train some steps without one of the checks; return (processor time, wall time) of a step in milliseconds."""
        finite = replace(self.config.training, check_for_nan_in_loss_and_grad=without != "finite")
        self.trainer.config = replace(self.config, training=finite)
        self.trainer.guard._kept = [] if without == "rerun" else self.keeps
        data = self.plain if without == "rerun" else self.kept
        watched = contextlib.nullcontext() if without == "hangs" else hang_watch.watching(0, 1)
        with watched:
            if without != "hangs":
                hang_watch.set_limits(self.config.hangs, 10)
            began = time.process_time(), time.perf_counter()
            for _ in range(steps):
                self.trainer._step(data)
            ended = time.process_time(), time.perf_counter()
        return tuple(1000 * (end - begin) / steps for begin, end in zip(began, ended))


def with_bounds(numbers: list[float]) -> tuple[float, float, float]:
    """Return the median, and the bounds of its 95 % confidence interval, by order statistics."""
    ordered = sorted(numbers)
    half_width = 0.98 * math.sqrt(len(numbers))
    low = round(len(ordered) / 2 - half_width)
    high = round(len(ordered) / 2 + half_width)
    return statistics.median(ordered), ordered[max(low, 0)], ordered[min(high, len(ordered) - 1)]


# ---------------------------------------------------------------- the calls of the checks, alone


def timed(call: Callable[[], object], calls: int = 1000, rounds: int = 30) -> tuple[float, float]:
    """Return (median, maximum) over the rounds of the thread's processor time for one call, in milliseconds."""
    times = []
    for _ in range(rounds):
        start = time.thread_time()
        for _ in range(calls):
            call()
        times.append(1000 * (time.thread_time() - start) / calls)
    return statistics.median(times), max(times)


def alone(run: Run, collectives: int) -> None:
    """Print the cost of the calls that each check adds to a step, as a share of the step."""
    seen: dict[str, tuple] = {}
    judge, non_finite_problem = run.trainer.guard.judge, train_step.non_finite_problem
    run.trainer.guard.judge = lambda *given: seen.setdefault("judge", given) and judge(*given)
    train_step.non_finite_problem = lambda *given: (
        seen.setdefault("non_finite_problem", given) and non_finite_problem(*given)
    )
    run.turn(None, 2)
    run.trainer.guard.judge, train_step.non_finite_problem = judge, non_finite_problem
    step = min(run.turn(None, 1)[0] for _ in range(20))
    microbatches = run.trainer.pipeline.batch.num_microbatches
    kept = RewindableBatches(itertools.repeat({}))

    def keep() -> None:
        kept.begin()
        for _ in range(microbatches):
            next(kept)

    def check() -> None:
        non_finite_problem(*seen["non_finite_problem"])
        judge(*seen["judge"])

    def note() -> None:
        rank_status.begin_step(1)
        for _ in range(collectives):
            rank_status.issue("all_reduce", "dp", (0, 1), 4096, -1)
            rank_status.end_wait()
        hang_watch.step_took(0.1)

    with hang_watch.watching(0, 1):
        noted = timed(note, calls=100)
        looked = timed(hang_watch._watch_of_process._note_activity, calls=100)
        hang_watch._watch_of_process.step_took(0.1)
    rows = {"finite": timed(check), "rerun": timed(keep), "hangs": noted}
    rows["hangs"] = tuple(a + b * step / 1000 for a, b in zip(noted, looked))
    print(f"a step: {step:.1f} ms of processor time, {microbatches} microbatches, {collectives} collectives")
    for name, (cost, most) in rows.items():
        print(
            f"  {name:7} {1000 * cost:9.2f} microseconds   {100 * cost / step:.4f} % (at most {100 * most / step:.4f} %)"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=30)
    parser.add_argument("--steps", type=int, default=1, help="of a turn")
    parser.add_argument("--alone", action="store_true", help="time the checks' own calls")
    parser.add_argument("--calls", type=int, default=200, help="collectives of a step, with --alone")
    parser.add_argument("--flags", default=FLAGS, help="of the run")
    options = parser.parse_args()
    torch.set_num_threads(1)
    run = Run(options.flags)
    if options.alone:
        return alone(run, options.calls)
    run.turn(None, 2)
    took: dict[str, list[tuple[float, float]]] = {name: [] for name in CHECKS}
    whole: list[tuple[float, float]] = []
    for turn in range(options.turns):
        for name in CHECKS[turn % 3 :] + CHECKS[: turn % 3]:
            order = (None, name) if turn % 2 else (name, None)
            both = {which: run.turn(which, options.steps) for which in order}
            whole.append(both[None])
            took[name].append(tuple(a - b for a, b in zip(both[None], both[name])))
    for index, clock in enumerate(("processor", "wall")):
        step = statistics.median(pair[index] for pair in whole)
        print(f"{clock} time: {step:.1f} ms a step")
        for name, pairs in took.items():
            cost, *bounds = with_bounds([pair[index] for pair in pairs])
            share = ", ".join(f"{100 * x / step:+.2f} %" for x in bounds)
            print(f"  {name:7} {cost:+8.3f} ms   {100 * cost / step:+.2f} % ({share})")


if __name__ == "__main__":
    main()
