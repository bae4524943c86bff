"""One microbatch computed twice, to the bit the same? It shows a device that computes wrongly, and which one, in any layout.

Before every N-th step all ranks run its first microbatch twice, and forget the gradients. In both runs a rank hashes
whatever it
sends in a collective or a transfer, whatever it receives, and at the end its loss and gradients:

    received the same so far, and sends something else      this rank computed wrongly in one of the runs
    first received something else                           another rank did

A third run follows a difference: it equals one of the first two after an error that comes and goes. If all three differ, the
device is broken, or its kernels add in varying order.
"""

import json
import random
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from megatron.core.ops.tensor_hash import tensor_hash
from megatron.core.parallel import collectives
from megatron.core.parallel.collectives import Call
from megatron.core.pipeline_parallel.schedules import Pipeline
from megatron.training.global_vars import print_rank_0
from megatron.training.rerun.base_check import Check
from megatron.training.step import StepWork

SENT, RECEIVED = "sends", "receives"
COMPUTED = "computes"
_SENDING = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send")  # whose input is a result of this rank
_RECEIVING = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "recv")


class Trail:
    """What a rank has sent, received and computed in one run, as hashes in order."""

    def __init__(self) -> None:
        self.places: list[tuple[str, str]] = []  # (SENT, RECEIVED or COMPUTED, what)
        self._hashes: list[Tensor] = []

    def note(self, how: str, what: str, x: Tensor) -> None:
        self.places.append((how, what))
        self._hashes.append(tensor_hash(x))

    def hear(self, call: Call, x: Tensor, *, is_result: bool) -> None:
        """A listener of the ledger."""
        if call.op in (_RECEIVING if is_result else _SENDING):
            self.note(
                RECEIVED if is_result else SENT, f"{call.op} over {call.axis}, call {len(self.places)} of the run", x
            )

    def hashes(self) -> list[int]:
        return torch.stack([one.to(self._hashes[0].device) for one in self._hashes]).tolist()


class FirstDifference(NamedTuple):
    """Where this rank's second run first differs from its first."""

    at: int
    how: str
    what: str


def first_difference(one: Trail, other: Trail) -> FirstDifference | None:
    if one.places != other.places:
        return FirstDifference(0, COMPUTED, "other calls")
    pairs = zip(one.places, one.hashes(), other.hashes(), strict=True)
    return next((FirstDifference(i, *place) for i, (place, a, b) in enumerate(pairs) if a != b), None)


class ReplayCheck(Check):
    """--rerun-interval."""

    def __init__(self, *parts: Any):
        super().__init__(*parts)
        self._steps = self._differed = 0
        seed, rank = self.runtime.config.training.seed, self.mesh["world"].rank
        self._injects = Injection(self.config.error_injection_type, rank)
        self._draw = random.Random(seed)  # alike on all ranks

    def before_step(self, iteration: int, work: StepWork) -> None:
        if iteration % self.config.replay_every:
            return
        self._begin_injection()
        for chunk in self.chunks:
            chunk.finish_param_gather()  # else the first run alone would wait for it
        least = least_microbatches(work.pipeline, work.num_microbatches)
        one = replace(work, num_microbatches=least)
        runs = [trail_of(one, self._injects, number) for number in range(2)]
        differences = self._of_all_ranks(first_difference(*runs))
        self._steps += 1
        if any(differences):
            runs.append(trail_of(one, self._injects, 2))
            comes_again = any(not any(self._of_all_ranks(first_difference(run, runs[2]))) for run in runs[:2])
            self._tell(iteration, differences, comes_again)
        elif self._injects.kind == "correct_result":
            print_rank_0(f"iteration {iteration}: a result was rejected as a test, and came again: no device failed")
        if self.config.rerun_mode == "report_stats" and iteration % self.runtime.config.log.steps_between_lines == 0:
            print_rank_0(
                f"iteration {iteration}: {self._steps} steps' first microbatch computed twice, {self._differed} with other bits"
            )

    def _begin_injection(self) -> None:
        """Choose whether, and on which rank, an error is injected."""
        rate, ranks = self.config.error_injection_rate, self.mesh["world"].size
        self._injects.is_on = rate > 0 and self._draw.randrange(rate) == 0
        self._injects.victim = self._draw.randrange(ranks)

    def _of_all_ranks(self, mine: FirstDifference | None) -> list[FirstDifference | None]:
        texts = collectives.all_gather_texts(json.dumps(mine), self.mesh["world"], self.device)
        return [None if found is None else FirstDifference(*found) for found in map(json.loads, texts)]

    def _tell(self, iteration: int, found: list[FirstDifference | None], comes_again: bool) -> None:
        """Stop, or with report_stats count and print. The ranks that computed wrongly raise, or else the first."""
        wrong = [rank for rank, one in enumerate(found) if one is not None and one.how != RECEIVED]
        wrong = wrong or [next(rank for rank, one in enumerate(found) if one is not None)]
        why = (
            "a third run equals one of the two: the device fails at times"
            if comes_again
            else "a third run differs from both: the device is broken, or its kernels are not deterministic"
        )
        ranks = " ".join(map(str, wrong))
        first = found[wrong[0]]
        text = (
            f"the first microbatch of iteration {iteration}, computed twice from the same weights and batch, has other bits on "
            f"rank{'s' * (len(wrong) > 1)} {ranks}, first in what it {first.how}: {first.what}; {why}"
        )
        self._differed += 1
        if self.config.rerun_mode == "report_stats":
            print_rank_0(f"WARNING: {text}")
            return
        here = self.mesh["world"].rank
        self.stop_if(f"{text} (rank {here} runs on {socket.gethostname()})" if here in wrong else "")


def least_microbatches(pipeline: Pipeline, m: int) -> int:
    """The fewest microbatches that the schedule takes, at most `m`."""
    for number in (1, pipeline.mesh["pp"].size):
        try:
            pipeline.schedule(number)
        except ValueError:
            continue
        if number <= m:
            return number
    return m


def trail_of(work: StepWork, injection: "Injection", number: int) -> Trail:
    """Run the microbatches, and return what this rank sent, received and computed. Every rank must call."""
    trail, ledger = Trail(), work.pipeline.mesh.ledger
    ledger.listener = trail.hear
    try:
        with injection.in_run(number, work.pipeline.chunks.values()):
            figures = work.compute()
    finally:
        ledger.listener = None
    for name, value in (("its loss", figures.mine.value), ("its tokens", figures.mine.tokens)):
        trail.note(COMPUTED, name, torch.as_tensor(value, dtype=torch.float64).reshape(1))
    for chunk in work.pipeline.chunks.values():
        for buffer in chunk.buffers:
            for part in buffer.sums.tensors:
                trail.note(COMPUTED, "its gradients", part)
    return trail


class Injection:
    """--error-injection-rate: wrong results on purpose, to see whether they are found. kind: one of Megatron's types."""

    def __init__(self, kind: str, rank: int):
        self._kind, self._rank = kind, rank
        self.is_on, self.victim = False, 0

    @property
    def kind(self) -> str | None:
        return self._kind if self.is_on else None

    @contextmanager
    def in_run(self, number: int, chunks: Any) -> Iterator[None]:
        """In the block the victim's first module with a floating-point output changes one element of it: in the first run
        (transient_error), or another element in each run (persistent_error)."""
        spoils = self.kind == "persistent_error" or (self.kind == "transient_error" and number == 0)
        handles, done = [], []

        def change(module: nn.Module, inputs: object, output: Any) -> Any:
            if not spoils or done or not isinstance(output, Tensor) or not output.is_floating_point():
                return output
            done.append(True)
            error = torch.zeros(output.shape, dtype=output.dtype, device=output.device)
            error.view(-1)[number] = 1.0
            return output + error

        if self.is_on and self._rank == self.victim:  # in each run, as a module with a hook may round differently
            handles = [module.register_forward_hook(change) for chunk in chunks for module in chunk.module.modules()]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
