"""Memory is printed in the log: predicted at the start, then measured beside the prediction.

An accelerator's allocator measures. On a CPU, --log-memory-interval counts every tensor of a step.
"""

import contextlib
from collections.abc import Iterator, Sequence

import torch

from megatron.core.distributed.data_parallel import DistributedDataParallel
from megatron.core.optimizer.flat_optimizer import FlatOptimizer
from megatron.core.parallel import collectives
from megatron.training.global_vars import Runtime, print_rank_0, print_rank_last
from megatron.training.memory.forecast_memory_along_schedule import DEVICE, IN_MEMORY, KINDS, Forecast
from megatron.training.memory.memory_check import offload_disk_free_note, state_bytes
from megatron.training.memory.predicted_memory_table import abridged_stage_table, table
from megatron.training.memory.track_memory_by_kind import MemoryTracker
from megatron.training.memory.zero_state_bytes_by_tier import amount, bytes_line

_STEADY = 2  # the first step of a run, counted from 1, with all buffers allocated


class MemoryMonitor:
    """The memory lines of one run. Every rank creates one and makes the same calls."""

    def __init__(
        self, runtime: Runtime, chunks: Sequence[DistributedDataParallel], optimizer: FlatOptimizer, forecast: Forecast
    ):
        self.runtime = runtime
        self.chunks = chunks
        self.optimizer = optimizer
        self._counts_tensors = runtime.device.module is None  # no allocator measures on a CPU
        self._tracker: MemoryTracker | None = None
        self._steps = 0
        self.predicted = forecast.ranks
        if self.predicted:
            lines = abridged_stage_table(self.predicted)
        else:  # the dry run failed: the script may do something that cannot run without values
            state = bytes_line(state_bytes(runtime, chunks))
            lines = [
                f"memory of a rank is not predicted ({forecast.problem}); state of a rank, without what passes: {state}"
            ]
        for line in (*lines, *offload_disk_free_note(runtime)):
            print_rank_0(line)

    @contextlib.contextmanager
    def step(self, iteration: int) -> Iterator[None]:
        """Measure the memory of the block, which is training step `iteration` (counted from 1), when due."""
        self._steps += 1
        if not self._is_due(iteration):
            yield
        elif self._counts_tensors:
            with MemoryTracker() as self._tracker:
                self._tracker.assign_state(self.chunks, self.optimizer)
                yield
        else:
            self.runtime.device.restart_peak()  # building the model may have needed more
            yield

    def report(self, iteration: int) -> None:
        """Print, when due, the most memory measured and predicted on any rank of each stage. Every rank must call."""
        if not self._is_due(iteration):
            return

        # gather (stage, measured bytes, predicted bytes) of all ranks
        measured = self._measured()
        predicted = [self._predicted(name) for name in measured]
        pp = self.runtime.mesh["pp"]
        row = [pp.rank, *measured.values(), *predicted]
        local = torch.tensor([row], dtype=torch.int64, device=self.runtime.device.torch_device)  # [1, 1 + 2 n]
        rows = collectives.all_gather(local, self.runtime.mesh["world"]).tolist()  # [world, 1 + 2 n]

        # print the most of each stage
        n = len(measured)
        lines = [["stage", *measured]]
        for rank in range(pp.size):
            stage_rows = [row[1:] for row in rows if row[0] == rank]
            most = [max(column) for column in zip(*stage_rows)]
            lines.append([str(rank), *map(self._beside, most[:n], most[n:])])
        head = f"memory of a rank in iteration {iteration}, measured" + (" / predicted:" if self.predicted else ":")
        print_rank_last("\n".join([head, *("  " + line for line in table(lines))]))
        self._tracker = None

    def _is_due(self, iteration: int) -> bool:
        """Whether this iteration is measured. Without an interval, an accelerator measures once."""
        interval = self.runtime.config.log.log_memory_interval
        if interval is None:
            return not self._counts_tensors and self._steps == _STEADY
        return interval > 0 and iteration % interval == 0

    def _measured(self) -> dict[str, int]:
        """Return the measured bytes by kind; an allocator knows only the resident bytes and the peak."""
        if self._tracker is not None:
            return {kind: int(self._tracker.peak[kind]) for kind in KINDS}
        device = self.runtime.device
        return {"state": int(device.allocated_bytes() or 0), "total": int(device.recent_peak_bytes() or 0)}

    def _predicted(self, name: str) -> int:
        """Return the predicted bytes of this rank for a name of `_measured`; 0 without a prediction."""
        if not self.predicted:
            return 0
        tiers = IN_MEMORY if self._counts_tensors else (DEVICE,)
        rank = self.predicted[self.runtime.mesh["pp"].rank]
        by_kind = rank.within(*tiers)
        if name == "state":
            return rank.state_within(*tiers)
        if name == "total":
            return sum(by_kind.values())
        return by_kind[name]

    def _beside(self, size: int, expected: int) -> str:
        return f"{amount(size)} / {amount(expected)}" if self.predicted else amount(size)
