"""The loop: a `Trainer` holds the parts of one run and takes its steps.

Trainer(...)    model and optimizer, pipeline, checkpoint, schedules, log, data, watchers
run()           each step: pipeline -> gradients -> update -> log -> maybe validate, stop, save
                at the end: validation and test losses
"""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import nn

from megatron.core import parallel_state
from megatron.core.base import rank_status
from megatron.core.datasets.data_loader import loader
from megatron.core.distributed.comm_volume import comm_volume_line
from megatron.core.models.common.model_rules import NO_RULES
from megatron.core.ops.attention.kernels import news_of_attention
from megatron.core.ops.compile.compiled_region import compile_fallback_lines, compile_log_line
from megatron.core.optimizer.lr_schedule import (
    AnySchedule,
    differences,
    learning_rate_schedule,
    read_schedule,
    schedule_in_force,
)
from megatron.core.optimizer.param_groups import GroupRule, default_group
from megatron.core.parallel import collectives
from megatron.core.pipeline_parallel.loss_func_results import ForwardStep, keep_reports
from megatron.training.arguments.checkpoint_to_load import where_to_go_on
from megatron.training.build import DatasetsProvider, built_chunks, refused_alike
from megatron.training.checkpointing import save_and_load
from megatron.training.checkpointing.save_folder import prepare_folder, prepare_hf_folder, warn_of_other_checkpoints
from megatron.training.checkpointing.save_manager import CheckpointManager
from megatron.training.checkpointing.train_state import TrainState
from megatron.training.evaluate import evaluate, where_to_read
from megatron.training.fault_tolerance import hang_watch
from megatron.training.fault_tolerance.exit_conditions import Exits
from megatron.training.global_vars import Runtime, is_last_rank, print_rank_0, print_rank_last
from megatron.training.initialize import as_settings_problem, available_cores
from megatron.training.memory.dry_run import Job
from megatron.training.memory.memory_monitor import MemoryWatch
from megatron.training.memory.peak_along_schedule import Forecast
from megatron.training.model_chunks import ModelProvider, build_optimizer, build_pipeline
from megatron.training.monitor.cpu_contention import Contention
from megatron.training.monitor.long_task_progress import heartbeat
from megatron.training.monitor.monitor import Watch
from megatron.training.monitor.training_log import StepNumbers, TrainingLog, print_validation
from megatron.training.num_samples import check_datasets, notes_of_no_validation, samples_to_request
from megatron.training.rerun.base_check import WrongNumbersError
from megatron.training.rerun.check_runner import Guard
from megatron.training.step import NotFiniteError, StepResult, train_step
from megatron.training.validation_sets import EvaluatedSet, lines_of, sets_of, too_small


@dataclass(frozen=True)
class NonLossData:
    """A script's hooks that read more than losses from the model after each validation."""

    process: Callable[[Any, int, Any], None] | None = None
    collect: Callable[[list[nn.Module]], Any] | None = None


class Trainer:
    """The parts of one run and the loop over its steps."""

    # ---------------------------------------------------------------- the parts, in the order in which they are built

    def __init__(
        self,
        runtime: Runtime,
        datasets_provider: DatasetsProvider,
        model_provider: ModelProvider,
        forward_step: ForwardStep,
        group_of: GroupRule = default_group,
        began: float | None = None,
        non_loss: NonLossData = NonLossData(),
    ):
        """began: `time.monotonic()` at the start of the run; default: now."""
        self.runtime, self.config = runtime, runtime.config
        self.mesh = runtime.mesh
        self.device, self.non_loss = runtime.device.torch_device, non_loss
        self.batch_sizes = runtime.batch_sizes
        self.batch_size = self.batch_sizes.last  # of validation, and of training at the end of a ramp
        began = time.monotonic() if began is None else began
        self.exits = Exits(self.config.training, self.mesh["world"], self.device, began)
        self._check_folders()
        rank_status.enter("building the model")
        with heartbeat("building the model", print_rank_0), runtime.device.memory_that_stays():
            # chunks by stage
            forecast = Forecast(Job(runtime, model_provider, forward_step, runtime.device.module is not None, group_of))
            self.chunks = built_chunks(model_provider, runtime, group_of, forecast)
            with refused_alike(runtime):
                self.optimizer = build_optimizer(self.chunks, runtime, group_of)
        runtime.device.return_freed()
        self.model = list(self.chunks.values())
        for line in compile_fallback_lines(self.model):
            print_rank_last(line)
        ranks_here = parallel_state.launched().local_size
        self.contention = Contention(ranks_here, available_cores()[0], torch.get_num_threads())
        self.memory = MemoryWatch(runtime, self.model, self.optimizer, forecast)
        self.pipeline = build_pipeline(self.chunks, runtime, forward_step)
        self.pipeline.transport.connect(self.pipeline.stages.neighbours)
        with as_settings_problem():
            self.state, log_state = self._load()
            length, done = self.config.training, self.state
            self.train_iters = length.train_iters or done.iteration + self.batch_sizes.steps(
                done.consumed_train_samples, length.train_samples
            )
            self._set_schedules()
            self.guard = Guard(runtime, self.pipeline, self.model, self.optimizer, self.state)
            self.log = self._build_log(log_state)
        self.datasets = self._build_datasets(datasets_provider)
        with collectives.raise_together(self.mesh["world"], self.device), as_settings_problem():
            self.watch = Watch(runtime, self.pipeline, self.model, self.state)
        rank_status.enter("getting ready")
        self.saves = CheckpointManager(runtime, self.model, self.optimizer, self.state, self.watch.note_progress)

    def _check_folders(self) -> None:
        """Refuse an unusable --save or --load before the model is built, which may take minutes."""
        config, world = self.config.checkpoint, self.mesh["world"]
        save_and_load.choose_start(config, world, self.device)  # first: a run that is refused makes no folder
        prepare_folder(config, world, self.device, self.runtime.held)
        prepare_hf_folder(self.config.hf.save_hf, world, self.device, self.runtime.held)

    def _load(self) -> tuple[TrainState, dict[str, Any] | None]:
        """(state to resume from, saved log of the interrupted log interval)."""
        rank_status.enter("loading the checkpoint")
        with heartbeat("loading the checkpoint", print_rank_0):
            state, log_state = save_and_load.load(self.runtime, self.model, self.optimizer)
        warn_of_other_checkpoints(self.config.checkpoint, state.iteration, self.mesh["world"])
        return state, log_state

    def _set_schedules(self) -> None:
        """Set learning rate and weight decay from this run's settings, or from the checkpoint's if a flag asks for that."""
        config, length = self.config, self.runtime.run_length
        state = self.state
        if length.unit == "iters":
            state.samples_per_iter = state.samples_per_iter or length.samples_per_iter
            length = replace(length, samples_per_iter=state.samples_per_iter)
        else:
            state.samples_per_iter = 0
        saved = state.schedules if self._steps_left > 0 else {}
        asks = config.learning_rate.use_checkpoint_opt_param_scheduler
        if asks and not state.schedules and config.checkpoint.load is not None:
            print_rank_0(
                "--use-checkpoint-opt_param-scheduler: no checkpoint is resumed that holds schedules; those of this run's "
                "settings are followed"
            )

        def in_force(mine: AnySchedule, name: str) -> AnySchedule:
            what, samples = name.replace("_", " "), state.scheduled_train_samples
            # Without its optimizer state a run has a schedule of its own, unless it asks for the checkpoint's.
            compared = saved.get(name) if config.checkpoint.load_optim or asks else None
            plan = schedule_in_force(mine, compared, config.learning_rate, what=what, samples=samples)
            if name in saved and (differ := differences(read_schedule(type(plan), saved[name], what=what), plan)):
                told = "; ".join(differ.values())
                print_rank_0(
                    f"the {what} follows this run's settings, not those of the checkpoint (in samples: {told})"
                )
            return plan

        self.schedule = in_force(learning_rate_schedule(config.learning_rate, length), "learning_rate")
        self.weight_decay = in_force(config.optimizer.weight_decay_schedule(length.samples), "weight_decay")
        self.state.schedules = {"learning_rate": asdict(self.schedule), "weight_decay": asdict(self.weight_decay)}

    def _build_log(self, state: dict[str, Any] | None) -> TrainingLog:
        flops, config = None, self.config.log
        if config.log_throughput:
            shape = self.runtime.model_shape
            if getattr(self.model[0].module, "rules", NO_RULES).is_bert:
                shape = replace(shape, is_bert=True)
            flops = shape.flops_per_sample / self.runtime.world_size
        tokens = self.config.data.tokens_per_sample if config.log_interval is None else None
        log = TrainingLog(self.train_iters, config.steps_between_lines, flops, progress_in_tokens=tokens)
        if state is not None:
            log.load_state(state)
        return log

    def _build_datasets(self, provider: DatasetsProvider) -> dict[str, Any]:
        """Data sets by split: for training one, or None; else a list of those that are evaluated, each large enough."""
        rank_status.enter("building the data sets")
        state, before = self.state, self.state.requested_train_samples
        sizes = samples_to_request(self.config.training, self.config.data, self.train_iters, self.batch_size, state)
        if before and sizes[0] > before:
            print_rank_0(
                f"this run requests {sizes[0]} training samples, the checkpoint's run {before}: the sample order may differ"
            )
        state.requested_train_samples = sizes[0]
        steps = self._steps_left
        needed = self.batch_sizes.consumed_after(state.consumed_train_samples, steps)
        building = heartbeat("building the data sets", print_rank_0)
        with collectives.raise_together(self.mesh["world"], self.device), as_settings_problem(), building:
            datasets = check_datasets(provider(sizes), steps, needed, state)
            at_once = self.runtime.samples_at_once
            sets = {split: sets_of(split, datasets[split], self.config.data, at_once) for split in ("valid", "test")}
        for line in (
            *notes_of_no_validation(self.config, datasets),
            *lines_of(sets, self.config.data, self.batch_size),
        ):
            print_rank_0(line)
        large = {split: [of for of in found if too_small(of, self.batch_size) is None] for split, found in sets.items()}
        return {**datasets, **large}

    @property
    def _steps_left(self) -> int:
        """Steps still to train."""
        return 0 if self.config.training.skip_train else max(self.train_iters - self.state.iteration, 0)

    # ---------------------------------------------------------------- the run

    def run(self) -> None:
        """Train to the last step, then validate and test. An exit flag ends the run earlier, without either."""
        self._announce()
        with self.exits.listening():
            if self.config.training.skip_train:
                print_rank_0("--skip-train: no training")
            elif reason := self._train():
                print_rank_0(f"exiting at iteration {self.state.iteration}, {reason}")
                return
            for split in ("valid", "test"):
                if reason := self.exits.asked():
                    print_rank_0(f"exiting before the {split} loss, {reason}")
                    return
                self._validate(split, at_end=True)

    def _train(self) -> str | None:
        """Train and save; the reason if the run stops early or on a signal, else None."""
        state = self.state
        if state.iteration >= self.train_iters:
            length = "--train-iters" if self.config.training.train_iters else "--train-samples"
            done = f"iteration {state.iteration} of {self.train_iters} is done"
            if state.iteration > self.train_iters:
                end = f"{length} ends the run at iteration {self.train_iters}"
                done = f"the checkpoint is at iteration {state.iteration}, and {end}"
            print_rank_0(
                f"nothing left to train: {done}; to train on, raise {length} and give --override-opt_param-scheduler, as a "
                "longer run also decays the learning rate later"
            )
            self.saves.export_if_missing()
            return None
        data = self.training_data()
        self.guard.begin()
        reason = self.exits.asked()  # while the run started
        with self.saves:
            while state.iteration < self.train_iters and reason is None:
                if state.iteration + 1 in self.config.guard.iterations_to_skip:
                    data = self._leave_out()
                else:
                    self._step(data)
                self._validate_if_due()
                last = state.iteration == self.train_iters
                reason = self.exits.reason(state.iteration, last=last)
                self._save_if_due(last=last or reason is not None)
        for chunk in self.model:
            chunk.finish_param_gather()
        return reason

    def training_data(self) -> dict[int, Iterator | None]:
        """The batches of training by stage, from the next sample on."""
        return self.guard.keeping(self._iterators("train", self.datasets["train"], self.state.consumed_train_samples))

    def _leave_out(self) -> dict[int, Iterator | None]:
        """Pass over the samples of an iteration, unread; returns the iterators that begin after them."""
        state, batch_size = self.state, self.batch_sizes.at(self.state.consumed_train_samples)
        first, scaler = state.consumed_train_samples, self.optimizer.scaler
        state.iteration += 1
        state.consumed_train_samples += batch_size
        print_rank_0(
            f"iteration {state.iteration} is left out, as --iterations-to-skip asks: samples {first} to {first + batch_size - 1}"
        )
        self._report(
            StepResult({}, 0.0, 1.0 if scaler is None else scaler.scale, skipped=True), batch_size, left_out=True
        )
        return self.training_data()

    def _step(self, data: Mapping[int, Iterator | None]) -> None:
        state = self.state
        batch_size = self.batch_sizes.at(state.consumed_train_samples)
        lr, decoupled_lr = self._rates()
        rank_status.begin_step(state.iteration + 1)
        began = time.monotonic()
        with self._naming_the_step(), self.watch.step(state.iteration + 1), self.memory.step(state.iteration + 1):
            result = train_step(
                self.pipeline,
                self.optimizer,
                data,
                first_sample=state.consumed_train_samples,
                lr=lr,
                decoupled_lr=decoupled_lr,
                weight_decay=self.weight_decay.at(state.scheduled_train_samples),
                num_microbatches=batch_size // self.runtime.samples_at_once,
                check_finite=self.config.training.check_for_nan_in_loss_and_grad,
                timers=self.runtime.timers,
                empty=self._empty_unused,
                guard=self.guard,
            )
            if not result.skipped:
                self.guard.after_update(state.iteration + 1)
        hang_watch.step_took(time.monotonic() - began)
        state.iteration += 1
        state.consumed_train_samples += batch_size
        state.scheduled_train_samples += 0 if result.skipped else self._scheduled(batch_size)
        self._report(result, batch_size)
        self.tidy_up()

    def tidy_up(self) -> None:
        """Print what the last step has compiled, and which kernels it could not use; return the memory that compiling took, or
        that steps have left in pieces."""
        if news := compile_log_line():
            print_rank_last(news)
        for line in news_of_attention():
            print_rank_last(line)
        self.runtime.device.return_freed_if_grown(surely=bool(news))

    @contextmanager
    def _naming_the_step(self) -> Iterator[None]:
        """Add the iteration, and how to resume, to the error of a step with wrong numbers."""
        try:
            yield
        except (NotFiniteError, WrongNumbersError) as error:
            where = where_to_go_on(self.config.checkpoint.save)
            raise type(error)(f"{error}. This was iteration {self.state.iteration + 1}; {where}") from error

    def _rates(self) -> tuple[float, float | None]:
        """The learning rate of the next step, and the decoupled one."""
        at = self.state.scheduled_train_samples
        return self.schedule.at(at), self.schedule.decoupled_at(at)

    def _empty_unused(self, level: int) -> None:
        if self.runtime.config.device.empty_unused_memory_level >= level:
            self.runtime.device.empty_unused()

    def _scheduled(self, batch_size: int) -> int:
        """Samples by which a step advances the schedules. With --train-iters every iteration counts as the run's
        first did."""
        length = self.runtime.run_length
        if length.unit == "samples":
            return batch_size
        return batch_size * self.state.samples_per_iter // length.samples_per_iter

    def _report(self, result: StepResult, batch_size: int, *, left_out: bool = False) -> None:
        """Log the last step. left_out: it was not computed. Time spent on measurements is left out of the logged time."""
        state = self.state
        if left_out:
            self.log.leave_out()
        else:
            self.log.add(result.losses, result.is_nan, skipped=result.skipped)
        with self.log.paused():
            self.memory.report(state.iteration)
            numbers, tensors = self.watch.measure()
        norm, samples = None if result.skipped else result.grad_norm, state.consumed_train_samples
        lr, decoupled_lr = self._rates()
        scale = result.loss_scale
        step = StepNumbers(state.iteration, samples, batch_size, lr, decoupled_lr, scale, norm, **numbers)
        interval = self.log.line_if_due(step)
        if note := self.contention.note_if_due():
            print_rank_0(note)
        with self.log.paused():
            self.watch.report(step, result.losses, interval, tensors)

    # ---------------------------------------------------------------- once in a while

    def _validate_if_due(self) -> None:
        """Validate at --eval-interval, but not after the last step: `run` validates at the end."""
        interval = self.config.training.eval_interval
        if self.state.iteration < self.train_iters and interval and self.state.iteration % interval == 0:
            self._validate("valid", at_end=False)

    def _validate(self, split: str, *, at_end: bool) -> None:
        for of in self.datasets[split]:
            if of.is_whole or self.config.training.eval_iters > 0:
                self._evaluate(of, at_end=at_end)

    def _evaluate(self, of: EvaluatedSet, *, at_end: bool) -> None:
        """Evaluate one set and report its losses. Every rank must call."""
        with self.log.paused(), rank_status.during("validating", then="training"):
            at_once, length = self.runtime.samples_at_once, self.config.training
            first, num_microbatches = where_to_read(of, self.state.iteration, length, self.batch_size, at_once)
            losses = evaluate(
                self.pipeline,
                lambda first: self._iterators(of.split, of.samples, first),
                num_microbatches=num_microbatches,
                first_sample=first,
                has_empty_rows=of.is_whole and of.samples.has_empty_rows,
            )
            print_validation(of.split, of.name, self.state.iteration, losses, at_end=at_end)
            self.watch.report_validation(of.name, losses, at_end=at_end)
            if self.non_loss.process is not None:
                self._show_non_loss_data(of, first, num_microbatches)

    def _show_non_loss_data(self, of: EvaluatedSet, first_sample: int, num_microbatches: int) -> None:
        """Call the script's hooks; the last rank gets the data. Every rank must call: all run one more batch."""
        data = []
        with torch.no_grad():
            if self.non_loss.collect is not None:
                data = self.non_loss.collect(self.model)
            else:
                step = keep_reports(self.pipeline.forward_step, data, non_loss=True)
                few = min(num_microbatches, self.pipeline.batch.num_microbatches)
                options = {"training": False, "num_microbatches": few, "forward_step": step}
                data_iterators = self._iterators(of.split, of.samples, first_sample)
                self.pipeline.run(data_iterators, first_sample, **options)
        if is_last_rank():
            self.non_loss.process(data, self.state.iteration, None)

    def _save_if_due(self, *, last: bool) -> None:
        self.saves.poll()
        if due := self.saves.due_actions(last=last):
            with self.log.paused(), rank_status.during("saving", then="training"):
                self.guard.before_save()
                for save in due:
                    save(self.log.state())

    def _iterators(self, split: str, dataset: Any, first_sample: int) -> dict[int, Iterator | None]:
        """Batches of a data set by stage; None except on the first rank of each tensor-parallel group, which alone reads
        data.

        Middle stages have iterators too, as scripts may ask before they look at their stage. Nothing is read until asked
        for.
        """
        samples, kind = self.mesh.samples, self.config.data.dataloader_type
        where = {
            "consumed_samples": first_sample,
            "micro_batch_size": self.config.training.micro_batch_size,
            "data_parallel_rank": samples.rank,
            "data_parallel_size": samples.size,
            "num_workers": self.config.data.num_workers,
        }
        return {
            stage: loader(kind, dataset, split, **where) if self.mesh["tp"].is_first else None for stage in self.chunks
        }

    def _announce(self) -> None:
        """Print the model's parameter count, its traffic and where training starts and ends. Every rank must call."""
        total = save_and_load.count_parameters(self.model, self.mesh, self.device)
        print_rank_0(f"model of {total:,} parameters; training to iteration {self.train_iters}")
        chosen, axes = self.config.data_parallel, self.mesh.grad_axes(shards=True)
        if axes.reduce.size > 1:
            flats = [flat for chunk in self.model for flat in chunk.buffer_sizes()]
            inner, m = axes.shard.size, self.pipeline.batch.num_microbatches
            sizes = {"inner": inner, "outer": axes.reduce.size // inner, "microbatches": m}
            print_rank_0(comm_volume_line(flats, chosen.stage, **sizes, divides_outer=chosen.divides_over_outer))
        interval = self.config.log.steps_between_lines
        if self._steps_left and self.state.iteration // interval == self.train_iters // interval:
            print_rank_0(f"no iteration of this run is logged: none is a multiple of --log-interval {interval}")
        if self.state.iteration:
            print_rank_0(f"going on from iteration {self.state.iteration}")
