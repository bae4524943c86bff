"""One microbatch is computed twice: other bits show a device that computes wrongly, and which one, in any layout.

Before every N-th step all ranks run its first microbatch twice, and forget the gradients. In both runs a rank hashes
what it sends in a collective or a transfer, what it receives, and at the end its loss and gradients:

    received the same so far, and sends something else      this rank computed wrongly in one of the runs
    first received something else                           another rank did

After a difference a third run follows. If it equals one of the first two, the error comes and goes. If all three
differ, the device is broken, or its kernels add in varying order.
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
from megatron.training.result_checks.base_check import Check
from megatron.training.step import StepWork

# How a rank has a tensor; also the words of the message.
SENT = "sends"
RECEIVED = "receives"
COMPUTED = "computes"
# Operations of the ledger whose input, and whose output, is recorded.
_SENDING = (
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "all_to_all",
    "all_to_all_v",
    "send",
)  # whose input is a result of this rank
_RECEIVING = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "all_to_all_v", "broadcast", "recv")


class CommHashTrace:
    """Hashes of what a rank has sent, received and computed in one run, in order."""

    def __init__(self) -> None:
        self.places: list[tuple[str, str]] = []  # (SENT, RECEIVED or COMPUTED, what)
        self._hashes: list[Tensor] = []  # each []

    def note(self, how: str, what: str, x: Tensor) -> None:
        """Record a tensor, of any shape."""
        self.places.append((how, what))
        self._hashes.append(tensor_hash(x))

    def on_call(self, call: Call, x: Tensor, *, is_result: bool) -> None:
        """Record the input or output of a communication, x of any shape, as the ledger's listener."""
        operations = _RECEIVING if is_result else _SENDING
        if call.op not in operations:
            return
        how = RECEIVED if is_result else SENT
        self.note(how, f"{call.op} over {call.axis}, call {len(self.places)} of the run", x)

    def hashes(self) -> list[int]:
        device = self._hashes[0].device
        return torch.stack([tensor.to(device) for tensor in self._hashes]).tolist()


class FirstDifference(NamedTuple):
    """The first tensor in which the second run of this rank differs from the first."""

    index: int  # in the trace
    how: str
    what: str


def first_difference(first: CommHashTrace, second: CommHashTrace) -> FirstDifference | None:
    """Return the first tensor whose hash differs between two runs; None if there is none."""
    if first.places != second.places:
        return FirstDifference(0, COMPUTED, "other calls")
    hashes = zip(first.places, first.hashes(), second.hashes(), strict=True)
    for index, ((how, what), first_hash, second_hash) in enumerate(hashes):
        if first_hash != second_hash:
            return FirstDifference(index, how, what)
    return None


class RerunCheck(Check):
    """--rerun-interval: compute the first microbatch of a step twice."""

    def __init__(self, *parts: Any):
        super().__init__(*parts)
        self._is_first_step = True  # of this process
        self._num_checks = 0
        self._num_differences = 0
        self._injection = Injection(self.config.error_injection_type, self.mesh["world"].rank)
        self._random = random.Random(self.runtime.config.training.seed)  # the same on all ranks

    def before_step(self, iteration: int, work: StepWork) -> None:
        is_first_step, self._is_first_step = self._is_first_step, False
        if iteration % self.config.replay_every:
            return
        self._draw_injection()

        # two runs
        for chunk in self.chunks:
            chunk.finish_param_gather()  # else only the first run would wait for it, and its trace would differ
        first_microbatches = replace(work, num_microbatches=least_microbatches(work.pipeline, work.num_microbatches))
        if is_first_step:
            # The first run of a process finds out in which order to gather parameters ahead, and which gradients a product
            # may overwrite: those that it adds to zeros are 0 where later ones are -0.
            first_microbatches.compute()
        traces = [trace_of(first_microbatches, self._injection, 0), trace_of(first_microbatches, self._injection, 1)]
        differences = self._gather(first_difference(traces[0], traces[1]))
        self._num_checks += 1

        # a third run tells an error that comes and goes from a lasting one
        if any(differences):
            third = trace_of(first_microbatches, self._injection, 2)
            equals_one = False
            for trace in traces:
                if not any(self._gather(first_difference(trace, third))):
                    equals_one = True
                    break
            self._report(iteration, differences, equals_one)
        elif self._injection.kind == "correct_result":
            print_rank_0(f"iteration {iteration}: a result was rejected as a test, and came again: no device failed")

        is_logged = iteration % self.runtime.config.log.steps_between_lines == 0
        if self.config.rerun_mode == "report_stats" and is_logged:
            print_rank_0(
                f"iteration {iteration}: {self._num_checks} steps' first microbatch computed twice, "
                f"{self._num_differences} with other bits"
            )

    def _draw_injection(self) -> None:
        """Choose whether, and on which rank, an error is injected."""
        rate = self.config.error_injection_rate
        num_ranks = self.mesh["world"].size
        self._injection.is_on = rate > 0 and self._random.randrange(rate) == 0
        self._injection.victim = self._random.randrange(num_ranks)

    def _gather(self, local: FirstDifference | None) -> list[FirstDifference | None]:
        """Return the differences of all ranks. Every rank must call."""
        differences = []
        for text in collectives.all_gather_texts(json.dumps(local), self.mesh["world"], self.device):
            fields = json.loads(text)
            differences.append(None if fields is None else FirstDifference(*fields))
        return differences

    def _report(self, iteration: int, differences: list[FirstDifference | None], equals_one: bool) -> None:
        """Stop, or with report_stats count and print.

        The ranks that computed wrongly raise. If none did, because all of them first received something else, the first
        of these raises.
        """
        differing = [rank for rank, difference in enumerate(differences) if difference is not None]
        wrong = [rank for rank in differing if differences[rank].how != RECEIVED]
        if not wrong:
            wrong = [differing[0]]

        if equals_one:
            why = "a third run equals one of the two: the device fails at times"
        else:
            why = "a third run differs from both: the device is broken, or its kernels are not deterministic"
        ranks = " ".join(map(str, wrong))
        first = differences[wrong[0]]
        text = (
            f"the first microbatch of iteration {iteration}, computed twice from the same weights and batch, has other bits on "
            f"rank{'s' * (len(wrong) > 1)} {ranks}, first in what it {first.how}: {first.what}; {why}"
        )
        self._num_differences += 1
        if self.config.rerun_mode == "report_stats":
            print_rank_0(f"WARNING: {text}")
            return
        rank = self.mesh["world"].rank
        self.stop_if(f"{text} (rank {rank} runs on {socket.gethostname()})" if rank in wrong else "")


def least_microbatches(pipeline: Pipeline, m: int) -> int:
    """Return the fewest microbatches that the schedule accepts, at most `m`."""
    for number in (1, pipeline.mesh["pp"].size):
        try:
            pipeline.schedule(number)
        except ValueError:
            continue
        if number <= m:
            return number
    return m


def trace_of(work: StepWork, injection: "Injection", run: int) -> CommHashTrace:
    """Run the microbatches, and return what this rank sent, received and computed. Every rank must call.

    run: its number, from 0.
    """
    trace = CommHashTrace()
    ledger = work.pipeline.mesh.ledger
    ledger.listener = trace.on_call
    try:
        with injection.in_run(run, work.pipeline.chunks.values()):
            figures = work.compute()
    finally:
        ledger.listener = None
    for name, value in (("its loss", figures.rank_totals.value), ("its tokens", figures.rank_totals.tokens)):
        trace.note(COMPUTED, name, torch.as_tensor(value, dtype=torch.float64).reshape(1))  # [1]
    for chunk in work.pipeline.chunks.values():
        for buffer in chunk.buffers:
            for gradients in buffer.sums.tensors:
                trace.note(COMPUTED, "its gradients", gradients)
    return trace


class Injection:
    """Inject wrong results on purpose, to see whether they are found (--error-injection-rate).

    kind: one of Megatron's types; None in a check without an injection.
    """

    def __init__(self, kind: str, rank: int):
        self._kind = kind
        self._rank = rank
        self.is_on = False
        self.victim = 0  # rank

    @property
    def kind(self) -> str | None:
        return self._kind if self.is_on else None

    @contextmanager
    def in_run(self, run: int, chunks: Any) -> Iterator[None]:
        """Change, in the block, one element of the output of the victim's first module with a floating-point output.

        transient_error: in the first run. persistent_error: another element in each run.
        """
        injects = self.kind == "persistent_error" or (self.kind == "transient_error" and run == 0)
        is_done = False

        def change(module: nn.Module, inputs: object, output: Any) -> Any:
            nonlocal is_done
            if not injects or is_done or not isinstance(output, Tensor) or not output.is_floating_point():
                return output
            is_done = True
            error = torch.zeros(output.shape, dtype=output.dtype, device=output.device)
            error.view(-1)[run] = 1.0
            return output + error

        handles = []
        if self.is_on and self._rank == self.victim:  # in every run, as a module with a hook may round differently
            for chunk in chunks:
                for module in chunk.module.modules():
                    handles.append(module.register_forward_hook(change))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
