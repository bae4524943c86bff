"""The training loop: a `Trainer` holds the parts of one run and takes its steps.

Trainer(...)   builds model, optimizer and pipeline, loads the checkpoint, sets schedules, builds log, data and monitors
run()          takes the steps: pipeline -> gradients -> update -> log -> validation, stop and save where due
               at the end: validation and test losses
"""

import json
import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import nn

from megatron.core import parallel_state
from megatron.core.base import rank_status
from megatron.core.datasets.data_parallel_sampler_and_loader import loader
from megatron.core.distributed.zero_stage_comm_volume import comm_volume_by_stage_line
from megatron.core.ops.attention.kernels import news_of_attention
from megatron.core.ops.compile.compiled_region import compile_cost_line, whole_layer_fallback_lines
from megatron.core.ops.count_flops_by_module import FlopsRecord, stage_flops
from megatron.core.optimizer.lr_wd_schedule_by_samples import (
    AnySchedule,
    differences,
    learning_rate_schedule,
    read_schedule,
    schedule_in_force,
)
from megatron.core.optimizer.param_groups import GroupRule, default_group
from megatron.core.parallel import collectives
from megatron.core.pipeline_parallel.loss_func_results import ForwardStep, keep_reports
from megatron.training.arguments.choose_checkpoint_to_resume import resume_hint
from megatron.training.arguments.command_line import reason_lines
from megatron.training.build_model_optimizer_and_data import DatasetsProvider, build_chunks, refuse_together
from megatron.training.checkpointing import save_and_load_run_state
from megatron.training.checkpointing.check_and_lock_save_folder import (
    prepare_folder,
    prepare_hf_folder,
    warn_of_other_checkpoints,
)
from megatron.training.checkpointing.save_manager import SaveManager
from megatron.training.eval_tasks_during_training import EvalTasks
from megatron.training.evaluate_window_chosen_by_iteration import (
    evaluate,
    first_sample_and_microbatches,
    validations_until,
)
from megatron.training.fault_tolerance import hang_watch
from megatron.training.fault_tolerance.exit_conditions import ExitConditions
from megatron.training.global_vars import Runtime, is_last_rank, print_rank_0, print_rank_last
from megatron.training.initialize import affinity_cores, as_config_error
from megatron.training.make_chunks_optimizer_and_pipeline import ModelProvider, build_optimizer, build_pipeline
from megatron.training.memory.dry_run_of_one_rank import Job
from megatron.training.memory.forecast_memory_along_schedule import Forecast
from megatron.training.memory.log_measured_beside_predicted_memory import MemoryMonitor
from megatron.training.monitor.cpu_contention import CpuContention
from megatron.training.monitor.long_task_progress import heartbeat
from megatron.training.monitor.monitor import Monitor
from megatron.training.monitor.training_log import StepNumbers, TrainingLog, print_validation, task_line
from megatron.training.named_and_padded_validation_sets import (
    EvaluatedSet,
    evaluated_set_notes,
    evaluated_sets,
    reason_left_out,
)
from megatron.training.num_samples import check_datasets, notes_of_no_validation, samples_to_request
from megatron.training.result_checks.base_check import WrongNumbersError
from megatron.training.result_checks.check_runner import Guard
from megatron.training.step import NotFiniteError, StepResult, train_step


@dataclass(frozen=True)
class NonLossData:
    """A script's hooks that read more than losses from the model after each validation."""

    process: Callable[[Any, int, Any], None] | None = None
    collect: Callable[[list[nn.Module]], Any] | None = None


class Trainer:
    """The parts of one run, and the loop over its steps."""

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
        """Build all parts of the run. Every rank must call.

        began: `time.monotonic()` at the start of the run; default: now.

        The order: what can refuse the run cheaply, then the model, then the checkpoint, which fills the model and says
        how far training is; schedules and data sets depend on that.
        """
        self.runtime = runtime
        self.config = runtime.config
        self.mesh = runtime.mesh
        self.device = runtime.device.torch_device
        self.non_loss = non_loss
        self.batch_sizes = runtime.batch_sizes
        self._told_of_aux_weight = False
        self.eval_batch_size = self.config.eval_batch_size(runtime.world_size)
        world = self.mesh["world"]

        # the conditions that end the run: duration, signals
        if began is None:
            began = time.monotonic()
        self.exits = ExitConditions(self.config.training, world, self.device, began)

        # refuse an unusable --load or --save now, since building the model may take minutes
        start = save_and_load_run_state.agree_where_to_start(
            self.config.checkpoint, world, self.device
        )  # first: a refused run creates no folder
        save_and_load_run_state.refuse_other_settings(runtime, start)
        prepare_folder(self.config.checkpoint, world, self.device, runtime.resources)
        prepare_hf_folder(self.config.hf.save_hf, world, self.device, runtime.resources)

        # build the model chunks of this rank, by stage, and the optimizer over their buffers
        rank_status.enter("building the model")
        with heartbeat("building the model", print_rank_0), runtime.device.memory_that_stays():
            has_accelerator = runtime.device.module is not None
            forecast = Forecast(Job(runtime, model_provider, forward_step, has_accelerator, group_of))
            self.chunks = build_chunks(model_provider, runtime, group_of, forecast)
            with refuse_together(runtime):
                self.optimizer = build_optimizer(self.chunks, runtime, group_of)
        runtime.device.return_freed()
        self.model = list(self.chunks.values())
        for line in whole_layer_fallback_lines(self.model):
            print_rank_last(line)

        # watch the load of the cores and the memory
        ranks_of_node = parallel_state.launched().local_size
        cores, _ = affinity_cores()
        self.contention = CpuContention(ranks_of_node, cores, torch.get_num_threads())
        self.memory = MemoryMonitor(runtime, self.model, self.optimizer, forecast)

        # build the pipeline over the chunks
        self.pipeline = build_pipeline(self.chunks, runtime, forward_step)
        self.pipeline.transport.connect(self.pipeline.stages.neighbours)

        # validation may have microbatches of another size, and so other tensors between the stages
        self.eval_pipeline = self.pipeline
        if self.config.eval_micro_batch_size != self.config.training.micro_batch_size:
            self.eval_pipeline = build_pipeline(
                self.chunks, runtime, forward_step, micro_batch_size=self.config.eval_micro_batch_size
            )

        with as_config_error():
            # load the checkpoint into model and optimizer; log_state: the saved log of an interrupted log interval
            rank_status.enter("loading the checkpoint")
            with heartbeat("loading the checkpoint", print_rank_0):
                self.state, log_state = save_and_load_run_state.load(runtime, self.model, self.optimizer)
            warn_of_other_checkpoints(self.config.checkpoint, self.state.iteration, world)

            # set the length of the run; --train-samples is counted on from the samples already consumed
            training = self.config.training
            self.train_iters = training.train_iters or self.state.iteration
            if training.train_samples is not None:
                consumed = self.state.consumed_train_samples
                steps = self.batch_sizes.steps(consumed, training.train_samples)
                self.train_iters = self.state.iteration + steps

            # tell the script where the run is, before it builds the data sets
            self._tell_position()
            args = vars(runtime.args)  # past the warning for a script that assigns to a setting
            args["iteration"] = self.state.iteration
            args["train_iters"] = args.get("train_iters") or self.train_iters  # of --train-samples

            # set the schedules, the guard and the log
            self._set_schedules()
            self.guard = Guard(runtime, self.pipeline, self.model, self.optimizer, self.state)
            self.log = self._build_log(log_state)

        # build the data sets; how many samples they need follows from the checkpoint's state
        self.datasets = self._build_datasets(datasets_provider)
        self._tell_data_sets()
        with collectives.raise_together(world, self.device), as_config_error():
            self.eval_tasks = EvalTasks(
                training.eval_tasks,
                training.eval_tasks_limit,
                runtime.tokenizer,
                self.pipeline,
                self.config.data.seq_length,
            )

        # open the writers and profilers; a rank that cannot stops all ranks
        with collectives.raise_together(world, self.device), as_config_error():
            self.watch = Monitor(runtime, self.pipeline, self.model, self.state)

        # prepare for saving, last, since saves report their progress to the monitor
        rank_status.enter("getting ready")
        self.saves = SaveManager(runtime, self.model, self.optimizer, self.state, self.watch.note_progress)

    def _tell_position(self) -> None:
        """Write into the script's `args` what Megatron's `train` does. `args.iteration` stays that of the start."""
        args = self.runtime.args
        args.consumed_train_samples = self.state.consumed_train_samples
        args.skipped_train_samples = self.state.skipped_train_samples

    def _tell_data_sets(self) -> None:
        """Write into the script's `args` which splits the run reads, and the samples of earlier validations."""
        args = self.runtime.args
        training = self.config.training
        args.do_train = self.datasets["train"] is not None and (training.skip_train or self.train_iters > 0)
        args.do_valid = bool(self.datasets["valid"])
        args.do_test = bool(self.datasets["test"])
        windows = [evaluated for evaluated in self.datasets["valid"] if not evaluated.is_whole]
        validations = validations_until(self.state.iteration, training)
        args.consumed_valid_samples = validations * len(windows) * training.eval_iters * self.eval_batch_size

    def _set_schedules(self) -> None:
        """Set learning rate and weight decay from this run's settings.

        If a flag asks for that, they are the checkpoint's.
        """
        config = self.config
        state = self.state

        # the unit of the schedules: with --train-iters, an iteration counts as many samples as in the run's first start
        length = self.runtime.run_length
        if length.unit == "iters":
            state.samples_per_iter = state.samples_per_iter or length.samples_per_iter
            length = replace(length, samples_per_iter=state.samples_per_iter)
        else:
            state.samples_per_iter = 0

        # the checkpoint's schedules; a run without steps left compares nothing
        saved = state.schedules if self._steps_left > 0 else {}
        uses_saved = config.learning_rate.use_checkpoint_opt_param_scheduler
        if uses_saved and not state.schedules and config.checkpoint.load is not None:
            print_rank_0(
                "--use-checkpoint-opt_param-scheduler: no checkpoint is resumed that holds schedules; those of this run's "
                "settings are followed"
            )

        def in_force(from_settings: AnySchedule, name: str) -> AnySchedule:
            """Return the schedule to follow, and print how it differs from the checkpoint's."""
            title = name.replace("_", " ")
            # A run that does not load the optimizer state has a schedule of its own, unless it asks for the checkpoint's.
            compared = None
            if config.checkpoint.load_optim or uses_saved:
                compared = saved.get(name)
            samples = state.scheduled_train_samples
            followed = schedule_in_force(from_settings, compared, config.learning_rate, what=title, samples=samples)
            if name in saved:
                of_checkpoint = read_schedule(type(followed), saved[name], what=title)
                changes = differences(of_checkpoint, followed)
                if changes:
                    print_rank_0(
                        f"the {title} follows this run's settings, not those of the checkpoint "
                        f"(in samples: {'; '.join(changes.values())})"
                    )
            return followed

        self.schedule = in_force(learning_rate_schedule(config.learning_rate, length), "learning_rate")
        self.weight_decay = in_force(config.optimizer.weight_decay_schedule(length.samples), "weight_decay")
        state.schedules = {"learning_rate": asdict(self.schedule), "weight_decay": asdict(self.weight_decay)}

    def _build_log(self, saved_state: dict[str, Any] | None) -> TrainingLog:
        config = self.config.log

        # FLOPs of a sample on one rank, if the throughput is logged
        flops = None
        if config.log_throughput:
            flops = self._flops_per_sample() / self.runtime.world_size

        # without --log-interval, lines between the log lines show the progress in tokens
        tokens = self.config.data.tokens_per_sample if config.log_interval is None else None
        log = TrainingLog(
            self.train_iters,
            config.steps_between_lines,
            flops,
            progress_in_tokens=tokens,
            samples_of_run=self.batch_sizes.consumed_after(self.state.consumed_train_samples, self._steps_left),
        )
        if saved_state is not None:
            log.load_state(saved_state)
        return log

    def _flops_per_sample(self) -> int:
        """Return the model's FLOPs of one sample: the sum of what its layers say, on all stages. Every rank must call."""
        record = FlopsRecord()
        flops = 0
        uncounted = []
        with collectives.raise_together(self.mesh["world"], self.device):
            for stage, chunk in self.chunks.items():
                of_stage = stage_flops(chunk.module, self.config.data.seq_length, is_first=stage == 0, record=record)
                flops += of_stage.model
                uncounted += record.uncounted_in(chunk.module)
        texts = collectives.all_gather_texts(json.dumps([flops, uncounted]), self.mesh["pp"], self.device)
        of_stages = [json.loads(text) for text in texts]
        names = sorted({name for _, of_stage in of_stages for name in of_stage})
        if names:
            print_rank_last(
                f"WARNING: the products of {', '.join(names)} are not among the logged FLOPs; define count_flops "
                "(docs/adding_a_model.md: The FLOPs of a layer)"
            )
        return sum(flops for flops, _ in of_stages)

    def _build_datasets(self, provider: DatasetsProvider) -> dict[str, Any]:
        """Return the data sets by split: for training one, or None.

        For the others a list of `EvaluatedSet`, without those smaller than a batch. Every rank must call.
        """
        rank_status.enter("building the data sets")
        state = self.state

        # the number of samples to request
        batch_sizes = (self.batch_sizes.last, self.eval_batch_size)
        sizes = samples_to_request(self.config.training, self.config.data, self.train_iters, batch_sizes, state)
        requested_before = state.requested_train_samples
        if requested_before and sizes[0] > requested_before:
            print_rank_0(
                f"this run requests {sizes[0]} training samples, the checkpoint's run {requested_before}: the sample order "
                "may differ"
            )
        state.requested_train_samples = sizes[0]

        # call the script's provider; an error on one rank stops all
        steps = self._steps_left
        needed = self.batch_sizes.consumed_after(state.consumed_train_samples, steps)
        building = heartbeat("building the data sets", print_rank_0)
        with collectives.raise_together(self.mesh["world"], self.device), as_config_error(), building:
            datasets = check_datasets(provider(sizes), steps, needed, state)
            at_once = self.config.eval_samples_at_once(self.runtime.world_size)
            sets = {}
            for split in ("valid", "test"):
                sets[split] = evaluated_sets(split, datasets[split], self.config.data, at_once)

        # print notes, and leave out the sets that are smaller than a batch
        for line in notes_of_no_validation(self.config, datasets):
            print_rank_0(line)
        for line in evaluated_set_notes(sets, self.config.data, self.eval_batch_size):
            print_rank_0(line)
        large_sets = {}
        for split, sets_of_split in sets.items():
            large_sets[split] = [one for one in sets_of_split if reason_left_out(one, self.eval_batch_size) is None]
        return {**datasets, **large_sets}

    @property
    def _steps_left(self) -> int:
        """Steps still to train."""
        if self.config.training.skip_train:
            return 0
        return max(self.train_iters - self.state.iteration, 0)

    # ---------------------------------------------------------------- the run

    def run(self) -> None:
        """Train to the last step, then validate and test. An exit flag ends the run earlier, without either."""
        self._announce()
        with self.exits.listening():
            # train
            if self.config.training.skip_train:
                print_rank_0("--skip-train: no training")
            elif reason := self._train():
                print_rank_0(f"exiting at iteration {self.state.iteration}, {reason}")
                return

            # validate and test
            for split in ("valid", "test"):
                if reason := self.exits.signal_reason():
                    print_rank_0(f"exiting before the {split} loss, {reason}")
                    return
                self._validate(split, at_end=True)
            self._evaluate_tasks(at_end=True)

    def _train(self) -> str | None:
        """Train and save. Returns the reason if the run stops early or on a signal, else None."""
        state = self.state

        # a checkpoint may have all steps already
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

        # the loop: step, validate, decide whether to stop, save; saving comes last so that a stop is saved too
        data = self.training_data()
        self.guard.begin()
        reason = self.exits.signal_reason()  # a signal may have come while the run started
        with self.saves:
            while state.iteration < self.train_iters and reason is None:
                if state.iteration + 1 in self.config.guard.iterations_to_skip:
                    data = self._skip_iteration()
                else:
                    self._step(data)
                self._validate_if_due()
                last = state.iteration == self.train_iters
                reason = self.exits.reason(state.iteration, last=last)
                self._save_if_due(last=last or reason is not None)

        # wait for the gather of the last update's parameters
        for chunk in self.model:
            chunk.finish_param_gather()
        return reason

    def training_data(self) -> dict[int, Iterator | None]:
        """Return the training batches by stage, beginning with the next sample to consume."""
        iterators = self._iterators("train", self.datasets["train"], self.state.consumed_train_samples)
        return self.guard.keeping(iterators)

    def _skip_iteration(self) -> dict[int, Iterator | None]:
        """Skip the samples of an iteration without reading them. Returns new iterators that begin after them."""
        state = self.state
        first = state.consumed_train_samples
        batch_size = self.batch_sizes.at(first)
        state.iteration += 1
        state.consumed_train_samples += batch_size
        state.skipped_train_samples += batch_size
        self._tell_position()
        print_rank_0(
            f"iteration {state.iteration} is left out, as --iterations-to-skip asks: samples {first} to {first + batch_size - 1}"
        )
        scaler = self.optimizer.scaler
        loss_scale = 1.0 if scaler is None else scaler.scale
        self._report(StepResult({}, 0.0, loss_scale, skipped=True), batch_size, left_out=True)
        return self.training_data()

    def _step(self, data: Mapping[int, Iterator | None]) -> None:
        """Take one step and report it. Every rank must call."""
        state = self.state
        iteration = state.iteration + 1
        batch_size = self.batch_sizes.at(state.consumed_train_samples)
        lr, decoupled_lr = self._rates()
        rank_status.begin_step(iteration)
        self.runtime.args.curr_iteration = state.iteration  # Megatron counts the step under way from 0
        began = time.monotonic()

        # compute and update
        with self._naming_the_step(), self.watch.step(iteration), self.memory.step(iteration):
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
                self.guard.after_update(iteration)

        # count; a skipped step consumes its samples, but does not advance the schedules
        hang_watch.step_took(time.monotonic() - began)
        state.iteration = iteration
        state.consumed_train_samples += batch_size
        if not result.skipped:
            state.scheduled_train_samples += self._scheduled(batch_size)
        self._tell_position()

        # report
        self._report(result, batch_size)
        self.tidy_up()

    def tidy_up(self) -> None:
        """Print what the last step has compiled and which kernels it could not use.

        Return the memory that compiling took or that steps have fragmented.
        """
        compile_line = compile_cost_line()
        if compile_line:
            print_rank_last(compile_line)
        for line in news_of_attention():
            print_rank_last(line)
        self.runtime.device.return_freed_if_grown(surely=bool(compile_line))

    @contextmanager
    def _naming_the_step(self) -> Iterator[None]:
        """Add the iteration, and how to resume, to the error of a step with wrong numbers."""
        try:
            yield
        except (NotFiniteError, WrongNumbersError) as error:
            hint = resume_hint(self.config.checkpoint.save)
            raise type(error)(f"{error}. This was iteration {self.state.iteration + 1}; {hint}") from error

    def _rates(self) -> tuple[float, float | None]:
        """Return the learning rate of the next step, and the decoupled one."""
        samples = self.state.scheduled_train_samples
        return self.schedule.at(samples), self.schedule.decoupled_at(samples)

    def _empty_unused(self, level: int) -> None:
        if self.config.device.empty_unused_memory_level >= level:
            self.runtime.device.empty_unused()

    def _scheduled(self, batch_size: int) -> int:
        """Return the samples by which a step advances the schedules.

        With --train-iters every iteration counts as in the run's first start, whatever the batch size is now.
        """
        length = self.runtime.run_length
        if length.unit == "samples":
            return batch_size
        return batch_size * self.state.samples_per_iter // length.samples_per_iter

    def _report(self, result: StepResult, batch_size: int, *, left_out: bool = False) -> None:
        """Log the last step. left_out: it was not computed.

        Time spent on measurements is excluded from the logged time.
        """
        state = self.state

        # add the step to the log interval
        if left_out:
            self.log.leave_out()
        else:
            self.log.add(result.losses, result.is_nan, skipped=result.skipped)

        # measure
        with self.log.paused():
            self.memory.report(state.iteration)
            numbers, tensors = self.watch.measure()

        # print a line at the end of the interval
        lr, decoupled_lr = self._rates()
        step = StepNumbers(
            state.iteration,
            state.consumed_train_samples,
            batch_size,
            lr,
            decoupled_lr,
            result.loss_scale,
            None if result.skipped else result.grad_norm,
            **numbers,
        )
        interval = self.log.line_if_due(step)
        note = None if self._told_of_aux_weight else _aux_weight_note(result.weighed_tokens, result.tokens)
        if note is not None:
            print_rank_0(note)
            self._told_of_aux_weight = True
        if note := self.contention.note_if_due():
            print_rank_0(note)

        # pass the numbers to the writers
        with self.log.paused():
            of_layers = _by_layer(result.aux_by_layer) if self.config.tensorboard.moe_per_layer_logging else {}
            self.watch.report(step, result.losses, interval, tensors, of_layers=of_layers, left_out=left_out)

    # ---------------------------------------------------------------- validation and saving

    def _validate_if_due(self) -> None:
        """Validate at --eval-interval, but not after the last step: `run` validates at the end."""
        interval = self.config.training.eval_interval
        if not interval or self.state.iteration >= self.train_iters:
            return
        if self.state.iteration < (self.config.training.start_eval_at_iter or 0):
            return
        if self.state.iteration % interval == 0:
            self._validate("valid", at_end=False)
            self._evaluate_tasks(at_end=False)

    def _validate(self, split: str, *, at_end: bool) -> None:
        for evaluated in self.datasets[split]:
            if evaluated.is_whole or self.config.training.eval_iters > 0:
                self._evaluate(evaluated, at_end=at_end)

    def _evaluate(self, evaluated: EvaluatedSet, *, at_end: bool) -> None:
        """Evaluate one set and report its losses. Every rank must call."""
        with self.log.paused(), rank_status.during("validating", then="training"):
            first_sample, num_microbatches = first_sample_and_microbatches(
                evaluated,
                self.state.iteration,
                self.config.training,
                self.eval_batch_size,
                self.config.eval_samples_at_once(self.runtime.world_size),
            )
            losses = evaluate(
                self.eval_pipeline,
                lambda first: self._iterators(evaluated.split, evaluated.samples, first),
                num_microbatches=num_microbatches,
                first_sample=first_sample,
                has_empty_rows=evaluated.is_whole and evaluated.samples.has_empty_rows,
            )
            self.runtime.args.consumed_valid_samples += num_microbatches * self.config.eval_samples_at_once(
                self.runtime.world_size
            )
            print_validation(evaluated.split, evaluated.name, self.state.iteration, losses, at_end=at_end)
            self.watch.report_validation(evaluated.name, losses, at_end=at_end)
            if self.non_loss.process is not None:
                self._show_non_loss_data(evaluated, first_sample, num_microbatches)

    def _evaluate_tasks(self, *, at_end: bool) -> None:
        """Evaluate the tasks of --eval-tasks and report their metrics. Every rank must call."""
        if not self.eval_tasks.tasks:
            return
        with self.log.paused(), rank_status.during("validating", then="training"):
            for name, metrics in self.eval_tasks.evaluate().items():
                print_rank_last(task_line(name, self.state.iteration, metrics))
                self.watch.report_validation(name, metrics, at_end=at_end)

    def _show_non_loss_data(self, evaluated: EvaluatedSet, first_sample: int, num_microbatches: int) -> None:
        """Call the script's hooks; the last rank gets the data. Every rank must call: all run one more batch."""
        data = []
        with torch.no_grad():
            if self.non_loss.collect is not None:
                data = self.non_loss.collect(self.model)
            else:
                self.eval_pipeline.run(
                    self._iterators(evaluated.split, evaluated.samples, first_sample),
                    first_sample,
                    training=False,
                    num_microbatches=min(num_microbatches, self.eval_pipeline.batch.num_microbatches),
                    forward_step=keep_reports(self.eval_pipeline.forward_step, data, non_loss=True),
                )
        if is_last_rank():
            self.non_loss.process(data, self.state.iteration, None)

    def _save_if_due(self, *, last: bool) -> None:
        self.saves.poll()
        due = self.saves.due_actions(last=last)
        if not due:
            return
        with self.log.paused(), rank_status.during("saving", then="training"):
            self.guard.before_save()
            for save in due:
                save(self.log.state())

    def _iterators(self, split: str, dataset: Any, first_sample: int) -> dict[int, Iterator | None]:
        """Return the batches of a data set by stage.

        They are None except on the first rank of each tensor-parallel group, which alone reads data.

        Middle stages have iterators too, since scripts may call next() before they look at their stage. Nothing is read
        before that call.
        """
        samples = self.mesh.samples
        training = self.config.training
        micro_batch_size = training.micro_batch_size if split == "train" else self.config.eval_micro_batch_size
        iterators: dict[int, Iterator | None] = {}
        for stage in self.chunks:
            iterators[stage] = None
            if self.mesh["tp"].is_first:
                iterators[stage] = loader(
                    self.config.data.dataloader_type,
                    dataset,
                    split,
                    consumed_samples=first_sample,
                    micro_batch_size=micro_batch_size,
                    data_parallel_rank=samples.rank,
                    data_parallel_size=samples.size,
                    num_workers=self.config.data.num_workers,
                )
        return iterators

    def _announce(self) -> None:
        """Print the model's parameter count, its communication volume, and where training starts and ends.

        Every rank must call.
        """
        # parameters
        counts = save_and_load_run_state.count_parameters(self.model, self.mesh, self.device)
        share = ""
        if counts.trainable != counts.total:
            share = f", {counts.trainable:,} of them trainable ({100 * counts.trainable / counts.total:.4f}%)"
        training_to = "" if self.config.training.skip_train else f"; training to iteration {self.train_iters}"
        print_rank_0(f"model of {counts.total:,} parameters{share}{training_to}")

        # communication over the data-parallel ranks
        config = self.config.data_parallel
        axes = self.mesh.grad_axes(shards=True)
        if axes.reduce.size > 1:
            buffer_sizes = [size for chunk in self.model for size in chunk.buffer_sizes()]
            inner = axes.shard.size
            line = comm_volume_by_stage_line(
                buffer_sizes,
                config.stage,
                inner=inner,
                outer=axes.reduce.size // inner,
                microbatches=self.pipeline.batch.num_microbatches,
                divides_outer=config.divides_over_outer,
            )
            print_rank_0(line)

        # what has no effect on this model
        curves = self.config.tensorboard
        has_curves = (
            curves.is_on or self.config.log.metrics_file is not None
        )  # else the settings have a note of their own
        has_values = bool(self.pipeline.aux_losses) or self.config.transformer.has_experts
        if curves.moe_per_layer_logging and has_curves and not has_values:
            reasons = {"--moe-per-layer-logging": "the model has neither experts nor auxiliary losses of layers"}
            for note in reason_lines("no effect here", reasons):
                print_rank_0(note)

        # log lines and start
        interval = self.config.log.steps_between_lines
        if self._steps_left and self.state.iteration // interval == self.train_iters // interval:
            print_rank_0(f"no iteration of this run is logged: none is a multiple of --log-interval {interval}")
        if self.state.iteration:
            print_rank_0(f"going on from iteration {self.state.iteration}")


def _by_layer(aux_by_layer: Mapping[str, Mapping[int, float]]) -> dict[str, float]:
    """Return the curves of auxiliary losses by layer, under Megatron's names, which count layers from 0."""
    return {
        f"moe/{name}_layer_{number - 1}": value
        for name, by_number in aux_by_layer.items()
        for number, value in by_number.items()
    }


def _aux_weight_note(weighed_tokens: float | None, tokens: float) -> str | None:
    """Return a warning if auxiliary losses had another weight than their coefficients say; None if they had this one."""
    if weighed_tokens is None or not tokens or math.isclose(weighed_tokens, tokens, rel_tol=1e-6):
        return None
    return (
        f"WARNING: auxiliary losses are weighed against {weighed_tokens:.15g} tokens in a step, but loss_func counted "
        f"{tokens:.15g}, so they weigh {weighed_tokens / tokens:.6g} times what their coefficients say. The tokens known "
        "before a step are the sum of loss_mask of its batches, or all tokens of batches without a loss_mask; return "
        "(loss_sum, num_tokens, report) from loss_func with this num_tokens, or change the coefficients"
    )
