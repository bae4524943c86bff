"""A run's memory as predicted, at its start, and as measured, beside it: by the allocator of an accelerator, or, on
a CPU and where
asked for, by counting every tensor of a step.
"""

import contextlib
from collections.abc import Iterator, Sequence

import torch

from megatron.core import comm
from megatron.core.distributed.distributed_data_parallel import DistributedDataParallel
from megatron.core.optimizer.optimizer import FlatOptimizer
from megatron.training.memory.offload import room_left, state_bytes
from megatron.training.memory.report import amount, short_report, table
from megatron.training.memory.tier_bytes import bytes_line
from megatron.training.memory.timeline import DEVICE, IN_MEMORY, KINDS, Forecast
from megatron.training.memory.tracker import MemoryTracker
from megatron.training.runtime import Runtime, print_rank_0, print_rank_last

_STEADY = 2  # the step of a run, counted from 1, from which on all that it will need is there


class MemoryWatch:
    """The memory of one run. Every rank has one and calls it alike."""

    def __init__(
        self, runtime: Runtime, chunks: Sequence[DistributedDataParallel], optimizer: FlatOptimizer, forecast: Forecast
    ):
        self.runtime = runtime
        self.chunks, self.optimizer = chunks, optimizer
        self._counts = runtime.device.module is None  # whether tensors are counted here, since no allocator does
        self._tracker: MemoryTracker | None = None
        self._steps = 0
        self.predicted = forecast.ranks
        said = short_report(self.predicted) if self.predicted else [self._unknown(forecast.problem)]
        for line in (*said, *room_left(runtime)):
            print_rank_0(line)

    def _unknown(self, problem: str) -> str:
        """A script may do what cannot be done beforehand; its state is known all the same."""
        state = bytes_line(state_bytes(self.runtime, self.chunks))
        return f"memory of a rank is not predicted ({problem}); state of a rank, without what passes: {state}"

    @contextlib.contextmanager
    def step(self, iteration: int) -> Iterator[None]:
        """Training step number `iteration`, counted from 1, runs inside; its tensors are counted where that is due."""
        interval = self.runtime.config.log.log_memory_interval
        self._steps += 1
        if not self._counts:
            if self._is_due(iteration, interval):
                self.runtime.device.restart_peak()  # building the model may have needed more
            yield
            return
        if not (interval and iteration % interval == 0):
            yield
            return
        with MemoryTracker() as self._tracker:
            self._tracker.assign_state(self.chunks, self.optimizer)
            yield

    def report(self, iteration: int) -> None:
        """Print what was measured, where it is due, the most on any rank of each stage, beside the most predicted
        for any. Every rank
        must call."""
        interval = self.runtime.config.log.log_memory_interval
        due = self._tracker is not None if self._counts else self._is_due(iteration, interval)
        if not due:
            return
        measured = self._measured()
        pp, world = self.runtime.mesh["pp"], self.runtime.mesh["world"]
        device = self.runtime.device.torch_device
        numbers = [pp.rank, *measured.values(), *(self._expected(kind) for kind in measured)]
        mine = torch.tensor([numbers], dtype=torch.int64, device=device)
        rows = comm.all_gather(mine, world).tolist()
        stages = [
            [max(column) for column in zip(*(row[1:] for row in rows if row[0] == rank))] for rank in range(pp.size)
        ]
        lines = [["stage", *measured]]
        n = len(measured)
        lines += [[str(rank), *map(self._beside, most[:n], most[n:])] for rank, most in enumerate(stages)]
        head = f"memory of a rank in iteration {iteration}, measured" + (" / predicted:" if self.predicted else ":")
        print_rank_last("\n".join([head, *("  " + line for line in table(lines))]))
        self._tracker = None

    def _is_due(self, iteration: int, interval: int | None) -> bool:
        return self._steps == _STEADY if interval is None else iteration % interval == 0

    def _measured(self) -> dict[str, int]:
        """Bytes by kind, or, of an allocator that knows no kinds, what stays and the peak."""
        if self._tracker is not None:
            return {kind: int(self._tracker.peak[kind]) for kind in KINDS}
        device = self.runtime.device
        return {"state": int(device.allocated_bytes() or 0), "total": int(device.recent_peak_bytes() or 0)}

    def _expected(self, name: str) -> int:
        """What is predicted for this rank."""
        if not self.predicted:
            return 0
        tiers, rank = IN_MEMORY if self._counts else (DEVICE,), self.predicted[self.runtime.mesh["pp"].rank]
        held = rank.within(*tiers)
        return {**held, "state": rank.state_within(*tiers), "total": sum(held.values())}[name]

    def _beside(self, size: int, expected: int) -> str:
        return f"{amount(size)} / {amount(expected)}" if self.predicted else amount(size)
