"""`Watch`: all observers of a run behind one interface: sinks, norms, timers, profiles, statistics, progress.txt.

The loop calls it around each step:

    with watch.step(number):        profile, hooks of --inspect
        train_step(...)
    watch.measure()                 numbers that all ranks compute together, when due
    watch.report(...)               records for the sinks, the timer table, the progress line
"""

import contextlib
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from datetime import datetime
from typing import Any

from megatron.core.base import output_streams
from megatron.core.base.dataclass_flags import ConfigError
from megatron.core.distributed.data_parallel import DistributedDataParallel
from megatron.core.distributed.params_norm_and_zeros import num_zeros_in_grad, params_norm
from megatron.core.pipeline_parallel.schedule.actions import Action, Op
from megatron.core.pipeline_parallel.schedules import Pipeline
from megatron.core.storage.paths import path_of
from megatron.training.arguments.monitor_config import writes_tensorboard
from megatron.training.checkpointing.train_state import TrainState
from megatron.training.global_vars import Runtime, print_rank_last
from megatron.training.monitor.health_files import Beacon
from megatron.training.monitor.straggler_detector import Stragglers
from megatron.training.monitor.tensor_statistics import Inspector, Statistics, TensorKey
from megatron.training.monitor.torch_profiler import MemoryHistory, StepProfiler
from megatron.training.monitor.training_log import Interval, StepNumbers, has_perplexity, perplexity, progress_line
from megatron.training.monitor.writers import MetricsFile, Record, Sink, SinkError, TensorBoardSink, WandbSink

# The timer of --timing-log-level 2 that counts an action's time.
_TIMER_OF = {
    op: name
    for name, ops in {
        "forward-compute": (Op.F,),
        "backward-compute": (Op.B, Op.I, Op.W),
        "forward-send": (Op.SEND_F, Op.SENT_F),
        "forward-recv": (Op.POST_F, Op.RECV_F),
        "backward-send": (Op.SEND_B, Op.SENT_B),
        "backward-recv": (Op.POST_B, Op.RECV_B),
    }.items()
    for op in ops
}


Measured = dict[TensorKey, Statistics]  # of --inspect; empty when not due


class Watch:
    """The observers of one run. Every rank has a `Watch` and makes the same calls; only the rank that logs has sinks."""

    def __init__(
        self, runtime: Runtime, pipeline: Pipeline, chunks: Sequence[DistributedDataParallel], state: TrainState
    ):
        config, mesh = runtime.config, runtime.mesh
        self.runtime, self.config = runtime, config
        self.chunks, self.state = chunks, state
        self._mesh = mesh
        self.timers = runtime.timers
        folder = config.tensorboard.tensorboard_dir or config.checkpoint.save
        self.profiler = StepProfiler(config.profile, folder, mesh)
        self.memory = MemoryHistory(config.profile, runtime.device, mesh["world"].rank)
        self._inspector: Inspector | None = None
        self._steps = 0  # since the timers were last read
        self.sinks: list[Sink] = make_sinks(runtime, state.iteration) if mesh["world"].rank == mesh.reporter() else []
        log = config.log
        is_reporter = mesh["world"].rank == mesh.reporter()
        files = (log.heartbeat_file, log.prometheus_file) if is_reporter else (None, None)
        length, tokens = config.training.train_iters, config.data.tokens_per_sample
        self._beacon = Beacon(*files, train_iters=length, tokens_per_sample=tokens)
        self._losses_told = 0
        self._stragglers = None
        if log.log_straggler and runtime.device.module is not None:
            raise ConfigError(
                "--log-straggler is not built yet for accelerators, whose waits the host does not see; leave it out"
            )
        if log.log_straggler:
            self._stragglers = Stragglers(mesh["world"], runtime.device.torch_device, log.straggler_minmax_count)
        if self.timers.level >= 2 or self.profiler.wanted:
            pipeline.around = self._around
        self.note_progress("Starting job")

    def _around(self, action: Action) -> AbstractContextManager:
        """The level-2 timer of `action`, and in profiled steps a named range."""
        name = _TIMER_OF.get(action.op)
        timer = contextlib.nullcontext() if name is None else self.timers(name, log_level=2)
        return self.profiler.range_of(str(action), timer) if self.profiler.is_on else timer

    # ---------------------------------------------------------------- around a step

    @contextlib.contextmanager
    def step(self, iteration: int) -> Iterator[None]:
        """Training step `iteration`, counted from 1, runs in the block."""
        if self.config.log.inspect is not None and iteration % self.config.log.inspect == 0:
            parallel = self.config.parallel.sequence_parallel_on
            self._inspector = Inspector(self.chunks, self._mesh, sequence_parallel=parallel)
        if self._stragglers is not None:
            self._stragglers.begin_step()
        began = time.monotonic()
        with self.profiler.step(iteration):
            yield
        if self._stragglers is not None:
            self._stragglers.end_step(time.monotonic() - began)

    def measure(self) -> tuple[dict[str, float], Measured]:
        """(num_zeros and params_norm, statistics of --inspect) of the last step, where due. Every rank must call."""
        numbers, tensors = {}, {}
        log, device = self.config.log, self.runtime.device.torch_device
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
        self, step: StepNumbers, losses: Mapping[str, float], interval: Interval | None, tensors: Measured
    ) -> None:
        """Send the last step's numbers to the sinks. interval: of its log line, None if none was due. Every rank must
        call."""
        self._tell_of_losses()
        self._beacon.step(step.iteration, step.consumed_samples, losses)
        if self._line_is_due and self._stragglers is not None:
            print_rank_last(self._stragglers.line())
        if self._curves_are_due and self.sinks:
            self._send("step", self._curve_values(step, losses))
        if interval is not None:
            times = self._times()
            if self.config.log.log_throughput:
                print_rank_last(progress_line(interval, self.config.data.tokens_per_sample, self._mfu(interval)))
            if self.sinks:
                self._send("interval", self._interval_values(interval) | times)
            self.memory.save()
        for (what, name), statistics in tensors.items():
            self._send("inspect", statistics.values(), {"what": what, "name": name})

    def report_validation(self, what: str, losses: Mapping[str, float | None], *, at_end: bool) -> None:
        """Send losses to the sinks. what: test, validation, or validation-NAME for one of several sets. losses: None for
        one that
        counted no token. at_end: after the last step."""
        losses = {name: loss for name, loss in losses.items() if loss is not None}
        values = {f"{name} {what}": value for name, value in losses.items()}
        if self.config.tensorboard.log_validation_ppl_to_tensorboard:
            values |= {f"{name} {what} ppl": perplexity(loss) for name, loss in losses.items() if has_perplexity(name)}
        self._send("validation", values, {"split": what, "at": "end" if at_end else "step"})

    def note_progress(self, event: str) -> None:
        """Append a line to progress.txt, with --log-progress, and tell supervisors of a checkpoint."""
        if number := event.partition("Saved checkpoint\tIteration: ")[2]:
            self._beacon.saved(int(number))
        if not self.config.log.log_progress or not self._mesh["world"].is_first:
            return
        job = os.environ.get("SLURM_JOB_ID", "")
        line = f"{datetime.now():%Y-%m-%d %H:%M:%S}\tJob ID: {job}\t# GPUs: {self.runtime.world_size}\t{event}\n"
        try:
            with (path_of(self.config.checkpoint.save) / "progress.txt").open("a", encoding="utf-8") as file:
                file.write(line)
        except OSError as error:
            output_streams.lose("progress.txt", error)

    def close(self) -> None:
        """Flush and close every output. Any rank may call, at any time."""
        self._tell_of_losses()
        self.profiler.finish()
        self.memory.save()
        for sink in self.sinks:
            try:
                sink.close()
            except SinkError as error:
                output_streams.lose(error.sink, error.why)

    def _tell_of_losses(self) -> None:
        """Put the outputs that were lost since the last call into those that are left. A loss among these is told
        next time."""
        news = output_streams.losses[self._losses_told :]
        self._losses_told += len(news)
        for loss in news:
            self._beacon.lost(str(loss))
            self.note_progress(f"WARNING: {loss}")
            self._send("lost output", {}, {"output": loss.output, "why": loss.why})

    # ---------------------------------------------------------------- what is sent

    def _send(self, kind: Any, values: Mapping[str, float], labels: Mapping[str, str] | None = None) -> None:
        record = Record(kind, self.state.iteration, self.state.consumed_train_samples, values, labels or {})
        for sink in self.sinks:
            try:
                sink.write(record)
            except SinkError as error:
                output_streams.lose(error.sink, error.why)

    def _curve_values(self, step: StepNumbers, losses: Mapping[str, float]) -> dict[str, float]:
        curves = self.config.tensorboard
        return {
            **(step.rates() if curves.log_learning_rate_to_tensorboard else {}),
            **({"batch-size": step.global_batch_size} if curves.log_batch_size_to_tensorboard else {}),
            **({} if step.grad_norm is None else losses),
            **({"loss-scale": step.loss_scale} if curves.log_loss_scale_to_tensorboard else {}),
            **({"world-size": self.runtime.world_size} if curves.log_world_size_to_tensorboard else {}),
            **(self.runtime.device.memory_numbers() if curves.log_memory_to_tensorboard else {}),
            **step.curves("grad_norm", "num_zeros", "params_norm"),
        }

    def _interval_values(self, interval: Interval) -> dict[str, float]:
        mfu = self._mfu(interval)
        return {
            **interval.losses,
            **interval.last.rates(),
            **interval.last.curves("loss_scale", "grad_norm", "num_zeros", "params_norm"),
            "batch-size": interval.last.global_batch_size,
            "iteration-time": interval.milliseconds / 1000,
            "tokens-per-second": interval.samples_per_second * self.config.data.tokens_per_sample,
            "skipped-iterations": interval.skipped_iterations,
            "nan-iterations": interval.nan_iterations,
            **{name: x for name, x in (("throughput", interval.tflops), ("mfu", mfu)) if x is not None},
        }

    def _mfu(self, interval: Interval) -> float | None:
        """Model FLOPs utilization: the share of the device's peak; None if either is unknown."""
        peak = self.runtime.device.peak_flops(self.config.transformer.params_dtype)
        return None if peak is None or interval.tflops is None else interval.tflops * 1e12 / peak

    def _times(self) -> dict[str, float]:
        """Print the timer table. Returns the slowest rank's seconds per step of each timer, if curves want them."""
        steps, self._steps = self._steps, 0
        table = self.timers.log(normalizer=steps)
        if not self.config.tensorboard.log_timers_to_tensorboard:
            return {}
        return {f"{name}-time": max(of.values()) / steps for name, of in table.items()}


def make_sinks(runtime: Runtime, iteration: int) -> list[Sink]:
    """The sinks that the settings name, for a run that starts at `iteration`. Raises ValueError or OSError."""
    config, sinks = runtime.config, []
    curves = config.tensorboard
    if config.log.metrics_file is not None:
        sinks.append(MetricsFile(config.log.metrics_file, iteration))
    if writes_tensorboard(curves):
        sinks.append(TensorBoardSink(curves.tensorboard_dir, curves.tensorboard_queue_size))
    if curves.wandb_project is not None:
        names = (curves.wandb_project, curves.wandb_exp_name, curves.wandb_entity, curves.wandb_save_dir)
        sinks.append(WandbSink(*names, config.as_json()))
    return sinks
