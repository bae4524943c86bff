"""Memory in the log: predicted at the start, then measured beside it. An accelerator's allocator measures; on a CPU,
--log-memory-interval counts every tensor of a step."""

import contextlib
from collections.abc import Iterator, Sequence

import torch

from megatron.core.distributed.data_parallel import DistributedDataParallel
from megatron.core.optimizer.flat_optimizer import FlatOptimizer
from megatron.core.parallel import collectives
from megatron.training.global_vars import Runtime, print_rank_0, print_rank_last
from megatron.training.memory.bytes_by_tier import amount, bytes_line
from megatron.training.memory.memory_check import room_left, state_bytes
from megatron.training.memory.memory_tracker import MemoryTracker
from megatron.training.memory.peak_along_schedule import DEVICE, IN_MEMORY, KINDS, Forecast
from megatron.training.memory.report import short_report, table

_STEADY = 2  # the first step of a run, counted from 1, with all buffers allocated


class MemoryWatch:
    """The memory of one run. Every rank makes one and calls it alike."""

    def __init__(
        self, runtime: Runtime, chunks: Sequence[DistributedDataParallel], optimizer: FlatOptimizer, forecast: Forecast
    ):
        self.runtime = runtime
        self.chunks, self.optimizer = chunks, optimizer
        self._counts = runtime.device.module is None  # no allocator measures on a CPU
        self._tracker: MemoryTracker | None = None
        self._steps = 0
        self.predicted = forecast.ranks
        if self.predicted:
            lines = short_report(self.predicted)
        else:  # the script may do something that cannot run without values
            state = bytes_line(state_bytes(runtime, chunks))
            lines = [
                f"memory of a rank is not predicted ({forecast.problem}); state of a rank, without what passes: {state}"
            ]
        for line in (*lines, *room_left(runtime)):
            print_rank_0(line)

    @contextlib.contextmanager
    def step(self, iteration: int) -> Iterator[None]:
        """The block is training step `iteration`, counted from 1; its memory is measured when due."""
        self._steps += 1
        if not self._is_due(iteration):
            yield
        elif self._counts:
            with MemoryTracker() as self._tracker:
                self._tracker.assign_state(self.chunks, self.optimizer)
                yield
        else:
            self.runtime.device.restart_peak()  # building the model may have needed more
            yield

    def report(self, iteration: int) -> None:
        """Print, when due, the most measured and the most predicted on any rank of each stage. Every rank must call."""
        if not self._is_due(iteration):
            return
        measured = self._measured()
        pp, world = self.runtime.mesh["pp"], self.runtime.mesh["world"]
        numbers, n = [pp.rank, *measured.values(), *map(self._expected, measured)], len(measured)
        mine = torch.tensor([numbers], dtype=torch.int64, device=self.runtime.device.torch_device)
        rows = collectives.all_gather(mine, world).tolist()
        lines = [["stage", *measured]]
        for rank in range(pp.size):
            most = [max(column) for column in zip(*(row[1:] for row in rows if row[0] == rank))]
            lines.append([str(rank), *map(self._beside, most[:n], most[n:])])
        head = f"memory of a rank in iteration {iteration}, measured" + (" / predicted:" if self.predicted else ":")
        print_rank_last("\n".join([head, *("  " + line for line in table(lines))]))
        self._tracker = None

    def _is_due(self, iteration: int) -> bool:
        """Without an interval, an accelerator measures once."""
        interval = self.runtime.config.log.log_memory_interval
        if interval is None:
            return not self._counts and self._steps == _STEADY
        return interval > 0 and iteration % interval == 0

    def _measured(self) -> dict[str, int]:
        """Bytes by kind; an allocator knows only the resident bytes and the peak."""
        if self._tracker is not None:
            return {kind: int(self._tracker.peak[kind]) for kind in KINDS}
        device = self.runtime.device
        return {"state": int(device.allocated_bytes() or 0), "total": int(device.recent_peak_bytes() or 0)}

    def _expected(self, name: str) -> int:
        """The prediction for this rank."""
        if not self.predicted:
            return 0
        tiers, rank = IN_MEMORY if self._counts else (DEVICE,), self.predicted[self.runtime.mesh["pp"].rank]
        held = rank.within(*tiers)
        return {**held, "state": rank.state_within(*tiers), "total": sum(held.values())}[name]

    def _beside(self, size: int, expected: int) -> str:
        return f"{amount(size)} / {amount(expected)}" if self.predicted else amount(size)
