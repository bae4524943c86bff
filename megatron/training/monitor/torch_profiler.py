"""Some steps are profiled into a Chrome trace, with named pipeline actions and collectives.

Device memory is recorded.
"""

import contextlib
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import torch

from megatron.core.base import tolerate_broken_output
from megatron.core.parallel.accelerator import Device
from megatron.core.parallel.mesh import Mesh
from megatron.training.arguments.monitor_config import ProfileConfig


class StepProfiler:
    """Profile the steps after `profile_step_start` up to `profile_step_end`, on the ranks of --profile-ranks.

    Writes `<folder>/profile/steps-11-12-rank-0.json`, for chrome://tracing or ui.perfetto.dev.
    """

    def __init__(self, config: ProfileConfig, folder: str | None, mesh: Mesh):
        self.config = config
        self._mesh = mesh
        self._rank = mesh["world"].rank
        self.wanted = config.profile and self._rank in config.profile_ranks
        self._folder = Path(folder or ".") / "profile"
        self._profile: torch.profiler.profile | None = None
        self._first = 0  # the first and last profiled step
        self._last = 0

    @property
    def is_on(self) -> bool:
        return self._profile is not None

    @contextlib.contextmanager
    def step(self, iteration: int) -> Iterator[None]:
        """Profile the block, if its step is to be profiled.

        iteration: of the training step, counted from 1.
        """
        if not self.wanted or not self.config.profile_step_start < iteration <= self.config.profile_step_end:
            yield
            return
        if self._profile is None:
            self._profile = torch.profiler.profile(record_shapes=True)
            self._first = iteration
            self._profile.start()
            self._mesh.ledger.profiled = True
        self._last = iteration
        with torch.profiler.record_function(f"step {iteration}"):
            yield

    @contextlib.contextmanager
    def range_of(self, name: str, inside: AbstractContextManager) -> Iterator[None]:
        """Show the block in the trace as `name`, and run it inside the context `inside`."""
        with torch.profiler.record_function(name), inside:
            yield

    def write_if_done(self, iteration: int) -> None:
        if iteration >= self.config.profile_step_end:
            self.finish()

    def finish(self) -> None:
        """Write the trace, if any step was recorded."""
        if self._profile is None:
            return
        self._mesh.ledger.profiled = False
        profile = self._profile
        self._profile = None
        profile.stop()
        path = self._folder / f"steps-{self._first}-{self._last}-rank-{self._rank}.json"
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            path.unlink(missing_ok=True)  # if writing fails, the file of an earlier run must not look like this one's
            profile.export_chrome_trace(str(path))
        except (OSError, RuntimeError) as error:  # torch's own error where the file cannot be opened
            tolerate_broken_output.report_lost_output(f"the profile {path}", error)
            return
        if not _is_complete(path):
            tolerate_broken_output.report_lost_output(
                f"the profile {path}", "torch has not written it whole: the disk may be full"
            )
            return
        print(f"wrote the profile of steps {self._first} to {self._last} of rank {self._rank}: {path}", flush=True)


def _is_complete(path: Path) -> bool:
    """Whether a trace ends with a brace: torch raises nothing on a full disk."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - 64))
            return file.read(64).rstrip().endswith(b"}")
    except OSError:
        return False


class MemoryHistory:
    """Write the device's allocation history since the start of the run, on the ranks of --profile-ranks."""

    def __init__(self, config: ProfileConfig, device: Device, rank: int):
        self._is_on = config.record_memory_history and rank in config.profile_ranks
        self._device = device
        path = Path(config.memory_snapshot_path)
        self.path = path if rank == 0 else path.with_name(f"{path.stem}-rank-{rank}{path.suffix}")

    def save(self) -> None:
        if not self._is_on:
            return
        try:
            self.path.absolute().parent.mkdir(parents=True, exist_ok=True)
            self._device.save_memory_history(str(self.path))
        except (OSError, RuntimeError) as error:
            tolerate_broken_output.report_lost_output(f"--memory-snapshot-path {self.path}", error)
