"""A run's memory as predicted, at its start, and as measured, beside it: by the allocator of an accelerator, or, on a CPU and where
asked for, by counting every tensor of a step.

The prediction is one for a `GPTModel` or a `BertModel` of our layers. Of a script's own model, a line says that there is none.
"""

import contextlib
from collections.abc import Iterator, Sequence

import torch

from megatron.core import comm
from megatron.core.distributed.distributed_data_parallel import DistributedDataParallel
from megatron.core.optimizer.optimizer import FlatOptimizer
from megatron.training.memory.estimate import DEVICE, IN_MEMORY, KINDS, RankMemory, estimate
from megatron.training.memory.of_run import MODELS, model_of, of_rank, sizes_of
from megatron.training.memory.offload import room_left, state_bytes
from megatron.training.memory.parameters import plans_of_stage
from megatron.training.memory.report import amount, short_report, table
from megatron.training.memory.tier_bytes import bytes_line
from megatron.training.memory.tracker import MemoryTracker
from megatron.training.runtime import Runtime, print_rank_0, print_rank_last

_STEADY = 2  # the step of a run, counted from 1, from which on all that it will need is there


class MemoryWatch:
    """The memory of one run. Every rank has one and calls it alike."""

    def __init__(self, runtime: Runtime, chunks: Sequence[DistributedDataParallel], optimizer: FlatOptimizer):
        self.runtime, self.chunks, self.optimizer = runtime, chunks, optimizer
        self._counts = runtime.device.module is None  # whether tensors are counted here, since no allocator does
        self._tracker: MemoryTracker | None = None
        self._steps = 0
        self.predicted: list[RankMemory] = []  # of the first data-parallel rank, for the table
        self.mine: list[RankMemory] = []
        self._predict()
        for line in (*self._said_at_start(), *room_left(runtime)):
            print_rank_0(line)

    def _said_at_start(self) -> list[str]:
        """What is predicted; of a script's own model, where something is offloaded, what can be said of it too: its state."""
        if self.predicted:
            return short_report(self.predicted)
        known = " or ".join(model.__name__ for model in MODELS)
        lines = [
            f"memory of a rank: activations are not predicted; they are for a {known} of the built-in layers, all trained"
        ]
        if self.runtime.tier is not None:
            lines.append(f"state of a rank, without what passes: {bytes_line(state_bytes(self.runtime, self.chunks))}")
        return lines

    def _predict(self) -> None:
        """Nothing on any rank unless every rank's model, and its buffers, are those of a GPT or a BERT."""
        runtime, pp = self.runtime, self.runtime.mesh["pp"]
        model = model_of(chunk.module for chunk in self.chunks)
        run = None if model is None else sizes_of(runtime, model)
        planned = run and [[plan.numel for plan in plans_of_stage(run, stage)] for stage in run.stages_of(pp.rank)]
        there = [[buffer.plan.numel for buffer in chunk.buffers] for chunk in self.chunks]
        other = torch.tensor([planned != there], dtype=torch.int64, device=runtime.device.torch_device)
        if not comm.all_reduce(other, runtime.mesh["world"], "max").item():
            mine = of_rank(run, runtime.mesh)
            self.predicted = estimate(run)
            self.mine = self.predicted if mine == run else estimate(mine)

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
        """Print what was measured, where it is due, the most on any rank of each stage, beside the most predicted for any. Every rank
        must call."""
        interval = self.runtime.config.log.log_memory_interval
        due = self._tracker is not None if self._counts else self._is_due(iteration, interval)
        if not due:
            return
        measured = self._measured()
        pp, world, device = self.runtime.mesh["pp"], self.runtime.mesh["world"], self.runtime.device.torch_device
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
        if not self.mine:
            return 0
        tiers, rank = IN_MEMORY if self._counts else (DEVICE,), self.mine[self.runtime.mesh["pp"].rank]
        held = rank.within(*tiers)
        return {**held, "state": rank.state_within(*tiers), "total": sum(held.values())}[name]

    def _beside(self, size: int, expected: int) -> str:
        return f"{amount(size)} / {amount(expected)}" if self.predicted else amount(size)
