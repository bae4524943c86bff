"""What the checks that are on by default cost of a step: each switched off in every other turn of one process.

    python benchmarks/default_checks.py                  a GPT of 5.3 M parameters, 2 microbatches of 256 tokens
    python benchmarks/default_checks.py --turns 40 --steps 3

    finite    NaN and infinity in losses and gradients (off: --no-check-for-nan-in-loss-and-grad)
    rerun     the batches of a step kept, to compute it again after wrong numbers (off: --rerun-mode disabled)
    hangs     the watch for ranks that hang (off: --hang-timeout 0)

A turn is `--steps` steps of the loop with all of them, then as many with one of them off, in an order that turns round. Prints for each
check the median over the turns of the difference of processor time, of all threads, and of wall time, in milliseconds a step and as a
share of a step; beside it the interval that holds the median with 95 % (order statistics). Run it on a machine that does nothing else.
"""

import argparse
import contextlib
import math
import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

import pretrain_gpt
from megatron.training.ending import hangs
from megatron.training.initialize import initialize_megatron
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
        """(processor time, wall time) of a step in milliseconds."""
        finite = replace(self.config.training, check_for_nan_in_loss_and_grad=without != "finite")
        self.trainer.config = replace(self.config, training=finite)
        self.trainer.guard._kept = [] if without == "rerun" else self.keeps
        data = self.plain if without == "rerun" else self.kept
        watched = contextlib.nullcontext() if without == "hangs" else hangs.watching(0, 1)
        with watched:
            if without != "hangs":
                hangs.set_limits(self.config.hangs, 10)
            began = time.process_time(), time.perf_counter()
            for _ in range(steps):
                self.trainer._step(data)
            ended = time.process_time(), time.perf_counter()
        return tuple(1000 * (end - begin) / steps for begin, end in zip(began, ended))


def with_bounds(numbers: list[float]) -> tuple[float, float, float]:
    """(median, and the bounds between which it lies with 95 %)."""
    ordered, half = sorted(numbers), 0.98 * math.sqrt(len(numbers))
    low, high = (round(len(ordered) / 2 + side * half) for side in (-1, 1))
    return statistics.median(ordered), ordered[max(low, 0)], ordered[min(high, len(ordered) - 1)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=30)
    parser.add_argument("--steps", type=int, default=1, help="of a turn")
    parser.add_argument("--flags", default=FLAGS, help="of the run")
    options = parser.parse_args()
    torch.set_num_threads(1)
    run = Run(options.flags)
    run.turn(None, 2)
    took: dict[str, list[tuple[float, float]]] = {name: [] for name in CHECKS}
    whole: list[tuple[float, float]] = []
    for turn in range(options.turns):
        for name in CHECKS[turn % 3 :] + CHECKS[: turn % 3]:
            order = (None, name) if turn % 2 else (name, None)
            both = {which: run.turn(which, options.steps) for which in order}
            whole.append(both[None])
            took[name].append(tuple(a - b for a, b in zip(both[None], both[name])))
    for at, clock in enumerate(("processor", "wall")):
        step = statistics.median(pair[at] for pair in whole)
        print(f"{clock} time: {step:.1f} ms a step")
        for name, pairs in took.items():
            cost, *bounds = with_bounds([pair[at] for pair in pairs])
            share = ", ".join(f"{100 * x / step:+.2f} %" for x in bounds)
            print(f"  {name:7} {cost:+8.3f} ms   {100 * cost / step:+.2f} % ({share})")


if __name__ == "__main__":
    main()
