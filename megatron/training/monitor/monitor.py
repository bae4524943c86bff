"""`Monitor` is the one interface to all observers of a run: writers, norms, timers, profiles, statistics, progress.txt.

The loop calls it around each step:

    with monitor.step(iteration):     profile, hooks of --inspect
        train_step(...)
    monitor.measure()                 numbers that all ranks compute together, when due
    monitor.report(...)               records for the writers, the timer table, the progress line
"""

import contextlib
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from datetime import datetime
from typing import Any

from megatron.core.base import tolerate_broken_output
from megatron.core.base.dataclass_flags import ConfigError
from megatron.core.distributed.data_parallel import DistributedDataParallel
from megatron.core.distributed.params_norm_and_zeros import num_zeros_in_grad, params_norm
from megatron.core.pipeline_parallel.schedule.actions import Action, Op
from megatron.core.pipeline_parallel.schedules import Pipeline
from megatron.core.storage.path_or_url import path_of
from megatron.training.arguments.monitor_config import can_write_tensorboard
from megatron.training.checkpointing.train_state_counters import TrainState
from megatron.training.global_vars import Runtime, print_rank_last
from megatron.training.monitor.expert_loads import IdleExperts, expert_loads, load_curves
from megatron.training.monitor.heartbeat_and_prometheus_files import HealthFiles
from megatron.training.monitor.straggler_by_busy_time import StragglerDetector
from megatron.training.monitor.tensor_statistics import Inspector, Statistics, TensorKey
from megatron.training.monitor.torch_profiler import MemoryHistory, StepProfiler
from megatron.training.monitor.training_log import (
    Interval,
    StepNumbers,
    eta_and_throughput_line,
    has_perplexity,
    perplexity,
)
from megatron.training.monitor.writers import MetricsFile, Record, TensorBoardWriter, WandbWriter, Writer, WriterError

# The timer of --timing-log-level 2 that counts an action's time.
_TIMER_OF = {
    Op.F: "forward-compute",
    Op.B: "backward-compute",
    Op.I: "backward-compute",
    Op.W: "backward-compute",
    Op.SEND_F: "forward-send",
    Op.SENT_F: "forward-send",
    Op.POST_F: "forward-recv",
    Op.RECV_F: "forward-recv",
    Op.SEND_B: "backward-send",
    Op.SENT_B: "backward-send",
    Op.POST_B: "backward-recv",
    Op.RECV_B: "backward-recv",
}


Measured = dict[TensorKey, Statistics]  # of --inspect; empty when not due


class Monitor:
    """The observers of one run.

    Every rank has a `Monitor` and makes the same calls; only the rank that logs has writers.
    """

    def __init__(
        self, runtime: Runtime, pipeline: Pipeline, chunks: Sequence[DistributedDataParallel], state: TrainState
    ):
        config = runtime.config
        mesh = runtime.mesh
        log = config.log
        is_reporter = mesh["world"].rank == mesh.reporter()
        self.runtime = runtime
        self.config = config
        self.chunks = chunks
        self.state = state
        self._mesh = mesh
        self.timers = runtime.timers
        self._steps = 0  # since the timers were last read

        # profiles and statistics
        folder = config.tensorboard.tensorboard_dir or config.checkpoint.save
        self.profiler = StepProfiler(config.profile, folder, mesh)
        self.memory = MemoryHistory(config.profile, runtime.device, mesh["world"].rank)
        self._inspector: Inspector | None = None

        # outputs, on the rank that logs
        self.writers: list[Writer] = make_writers(runtime, state.iteration) if is_reporter else []
        self._beacon = HealthFiles(
            log.heartbeat_file if is_reporter else None,
            log.prometheus_file if is_reporter else None,
            train_iters=config.training.train_iters,
            tokens_per_sample=config.data.tokens_per_sample,
        )
        self._losses_told = 0  # lost outputs that the other outputs know of

        # slow ranks
        self._idle_experts = IdleExperts()
        self._stragglers = None
        if log.log_straggler and runtime.device.module is not None:
            raise ConfigError(
                "--log-straggler is not built on accelerators yet, because the host does not see how long they wait; "
                "leave it out"
            )
        if log.log_straggler:
            self._stragglers = StragglerDetector(mesh["world"], runtime.device.torch_device, log.straggler_minmax_count)

        if self.timers.level >= 2 or self.profiler.wanted:
            pipeline.around = self._around
        self.note_progress("Starting job")

    def _around(self, action: Action) -> AbstractContextManager:
        """Return a context with the level-2 timer of `action`, and in profiled steps a named range."""
        name = _TIMER_OF.get(action.op)
        timer = contextlib.nullcontext() if name is None else self.timers(name, log_level=2)
        if self.profiler.is_on:
            return self.profiler.range_of(str(action), timer)
        return timer

    # ---------------------------------------------------------------- around a step

    @contextlib.contextmanager
    def step(self, iteration: int) -> Iterator[None]:
        """Observe the block, which is training step `iteration` (counted from 1)."""
        if self.config.log.inspect is not None and iteration % self.config.log.inspect == 0:
            self._inspector = Inspector(
                self.chunks, self._mesh, sequence_parallel=self.config.parallel.sequence_parallel_on
            )
        if self._stragglers is not None:
            self._stragglers.begin_step()
        began = time.monotonic()
        with self.profiler.step(iteration):
            yield
        if self._stragglers is not None:
            self._stragglers.end_step(time.monotonic() - began)

    def measure(self) -> tuple[dict[str, float], Measured]:
        """Return (num_zeros and params_norm, statistics of --inspect) of the last step, when due.

        Every rank must call.
        """
        numbers: dict[str, float] = {}
        tensors: Measured = {}
        log = self.config.log
        device = self.runtime.device.torch_device
        self._steps += 1
        self.profiler.write_if_done(self.state.iteration)
        if self._line_is_due or self._curves_are_due:
            if log.log_num_zeros_in_grad:
                numbers["num_zeros"] = num_zeros_in_grad(self.chunks, self._mesh, device)
            if log.log_params_norm:
                numbers["params_norm"] = params_norm(self.chunks, self._mesh, device)
        if self._inspector is not None:
            tensors = self._inspector.finish(device)
            self._inspector = None
        return numbers, tensors

    @property
    def _line_is_due(self) -> bool:
        return self.state.iteration % self.config.log.steps_between_lines == 0

    @property
    def _curves_are_due(self) -> bool:
        curves = self.config.tensorboard
        return curves.is_on and self.state.iteration % curves.tensorboard_log_interval == 0

    def report(
        self,
        step: StepNumbers,
        losses: Mapping[str, float],
        interval: Interval | None,
        tensors: Measured,
        *,
        of_layers: Mapping[str, float] | None = None,
        left_out: bool = False,
    ) -> None:
        """Send the last step's numbers to the writers. Every rank must call.

        interval: of the step's log line; None if none was due. of_layers: curves of single layers, of this step also in the
        interval's numbers. left_out: the step was not computed.
        """
        self._tell_of_losses()
        of_layers = dict(of_layers or {})
        if self.config.transformer.has_experts and (self._line_is_due or self._curves_are_due):
            loads = expert_loads(self.chunks, self._mesh["pp"], self.runtime.device.torch_device)
            for note in self._idle_experts.notes(loads):
                print_rank_last(note)
            if self.config.tensorboard.moe_per_layer_logging:
                of_layers |= load_curves(loads)
        losses = {**losses, **of_layers}
        computed = 0 if left_out else step.global_batch_size
        self._beacon.step(step.iteration, step.consumed_samples, losses, computed_samples=computed)
        if self._line_is_due and self._stragglers is not None:
            print_rank_last(self._stragglers.line())
        if self._curves_are_due and self.writers:
            self._send("step", self._curve_values(step, losses))
        if interval is not None:
            times = self._times()
            if self.config.log.log_throughput:
                print_rank_last(
                    eta_and_throughput_line(interval, self.config.data.tokens_per_sample, self._mfu(interval))
                )
            if self.writers:
                self._send("interval", self._interval_values(interval) | times | of_layers)
            self.memory.save()
        for (what, name), statistics in tensors.items():
            self._send("inspect", statistics.values(), {"what": what, "name": name})

    def report_validation(self, what: str, losses: Mapping[str, float | None], *, at_end: bool) -> None:
        """Send validation losses to the writers.

        what: test, validation, or validation-NAME for one of several sets.
        losses: by name; None for a loss of no token.
        at_end: after the last step.
        """
        known = {name: loss for name, loss in losses.items() if loss is not None}
        values = {f"{name} {what}": loss for name, loss in known.items()}
        if self.config.tensorboard.log_validation_ppl_to_tensorboard:
            for name, loss in known.items():
                if has_perplexity(name):
                    values[f"{name} {what} ppl"] = perplexity(loss)
        self._send("validation", values, {"split": what, "at": "end" if at_end else "step"})

    def note_progress(self, event: str) -> None:
        """Append a line to progress.txt, with --log-progress, and tell supervisors of a checkpoint."""
        saved_iteration = event.partition("Saved checkpoint\tIteration: ")[2]
        if saved_iteration:
            self._beacon.saved(int(saved_iteration))
        if not self.config.log.log_progress or not self._mesh["world"].is_first:
            return
        job = os.environ.get("SLURM_JOB_ID", "")
        line = f"{datetime.now():%Y-%m-%d %H:%M:%S}\tJob ID: {job}\t# GPUs: {self.runtime.world_size}\t{event}\n"
        try:
            with (path_of(self.config.checkpoint.save) / "progress.txt").open("a", encoding="utf-8") as file:
                file.write(line)
        except OSError as error:
            tolerate_broken_output.report_lost_output("progress.txt", error)

    def close(self) -> None:
        """Flush and close every output. Any rank may call, at any time."""
        self._tell_of_losses()
        self.profiler.finish()
        self.memory.save()
        for writer in self.writers:
            try:
                writer.close()
            except WriterError as error:
                tolerate_broken_output.report_lost_output(error.writer, error.why)

    def _tell_of_losses(self) -> None:
        """Tell the outputs that still work which others were lost since the last call.

        If one of them fails while it is told, the next call tells the rest of that.
        """
        new_losses = tolerate_broken_output.losses[self._losses_told :]
        self._losses_told += len(new_losses)
        for loss in new_losses:
            self._beacon.lost(str(loss))
            self.note_progress(f"WARNING: {loss}")
            self._send("lost output", {}, {"output": loss.output, "why": loss.why})

    # ---------------------------------------------------------------- what is sent

    def _send(self, kind: Any, values: Mapping[str, float], labels: Mapping[str, str] | None = None) -> None:
        """Write a record to every writer. A writer that fails is noted as a lost output."""
        record = Record(kind, self.state.iteration, self.state.consumed_train_samples, values, labels or {})
        for writer in self.writers:
            try:
                writer.write(record)
            except WriterError as error:
                tolerate_broken_output.report_lost_output(error.writer, error.why)

    def _curve_values(self, step: StepNumbers, losses: Mapping[str, float]) -> dict[str, float]:
        """Return the numbers of a step's curves, by name."""
        curves = self.config.tensorboard
        values: dict[str, float] = {}
        if curves.log_learning_rate_to_tensorboard:
            values |= step.rates()
        if curves.log_batch_size_to_tensorboard:
            values["batch-size"] = step.global_batch_size
        if step.grad_norm is not None:  # the step was not skipped
            values |= losses
        if curves.log_loss_scale_to_tensorboard:
            values["loss-scale"] = step.loss_scale
        if curves.log_world_size_to_tensorboard:
            values["world-size"] = self.runtime.world_size
        if curves.log_memory_to_tensorboard:
            values |= self.runtime.device.memory_numbers()
        return values | step.curves("grad_norm", "num_zeros", "params_norm")

    def _interval_values(self, interval: Interval) -> dict[str, float]:
        """Return the numbers of a log line, by name."""
        values = {
            **interval.losses,
            **interval.last.rates(),
            **interval.last.curves("loss_scale", "grad_norm", "num_zeros", "params_norm"),
            "batch-size": interval.last.global_batch_size,
            "iteration-time": interval.milliseconds / 1000,
            "tokens-per-second": interval.samples_per_second * self.config.data.tokens_per_sample,
            "skipped-iterations": interval.skipped_iterations,
            "nan-iterations": interval.nan_iterations,
        }
        if interval.tflops is not None:
            values["throughput"] = interval.tflops
        mfu = self._mfu(interval)
        if mfu is not None:
            values["mfu"] = mfu
        return values

    def _mfu(self, interval: Interval) -> float | None:
        """Return the model FLOPs utilization, the share of the device's peak; None if either is unknown."""
        peak = self.runtime.device.peak_flops(self.config.transformer.params_dtype)
        if peak is None or interval.tflops is None:
            return None
        return interval.tflops * 1e12 / peak

    def _times(self) -> dict[str, float]:
        """Print the timer table, and return the slowest rank's seconds per step of each timer, if curves need them."""
        steps = self._steps
        self._steps = 0
        table = self.timers.log(normalizer=steps)  # timer -> rank -> seconds
        if not self.config.tensorboard.log_timers_to_tensorboard:
            return {}
        return {f"{name}-time": max(by_rank.values()) / steps for name, by_rank in table.items()}


def make_writers(runtime: Runtime, iteration: int) -> list[Writer]:
    """Return the writers that the settings name, for a run that starts at `iteration`. Raises ValueError or OSError."""
    config = runtime.config
    writers: list[Writer] = []
    curves = config.tensorboard
    if config.log.metrics_file is not None:
        writers.append(MetricsFile(config.log.metrics_file, iteration))
    if can_write_tensorboard(curves):
        writers.append(TensorBoardWriter(curves.tensorboard_dir, curves.tensorboard_queue_size))
    if curves.wandb_project is not None:
        writers.append(
            WandbWriter(
                curves.wandb_project,
                curves.wandb_exp_name,
                curves.wandb_entity,
                curves.wandb_save_dir,
                config.as_json(),
            )
        )
    return writers
