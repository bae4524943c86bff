"""The one pretrain loop, shared by all top-level scripts.

pretrain(train_valid_test_datasets_provider, model_provider, ModelType.encoder_or_decoder, forward_step)

    initialize      settings, processes, device, tokenizer
    build           model chunks, buffers, optimizer, data
    load            where to go on
    each step       pipeline -> gradients -> update -> log -> maybe validate, save, stop
    at the end      validation and test losses
"""

import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import nn

from megatron.core import comm, parallel_state
from megatron.core.config import ConfigError
from megatron.core.datasets.batches import loader
from megatron.core.distributed.traffic import traffic_line
from megatron.core.enums import ModelType
from megatron.core.optimizer.lr_schedule import AnySchedule, learning_rate_schedule, schedule_in_force
from megatron.core.optimizer.param_groups import GroupRule, default_group
from megatron.core.pipeline_parallel.executor import ForwardStep
from megatron.core.pipeline_parallel.schedules import keep_reports
from megatron.core.pipeline_parallel.transport import TensorSpec
from megatron.training import checkpointing, failures
from megatron.training.arguments import ExtraArgs
from megatron.training.build import (
    DatasetsProvider,
    ModelProvider,
    build_model_and_optimizer,
    build_train_valid_test_data_iterators,
    get_model,
    setup_model_and_optimizer,
)
from megatron.training.evaluate import evaluate, window
from megatron.training.exits import Exits
from megatron.training.initialize import as_settings_problem, initialize_megatron, stop_with
from megatron.training.log import TrainingLog, validation_line
from megatron.training.memory.watch import MemoryWatch
from megatron.training.runtime import Runtime, is_last_rank, print_rank_0, print_rank_last, set_runtime
from megatron.training.samples import check_datasets, samples_to_request
from megatron.training.train_step import BatchShape, Pipeline, train_step
from megatron.training.watch import Watch

__all__ = [
    "Trainer",
    "build_train_valid_test_data_iterators",
    "get_model",
    "pretrain",
    "setup_model_and_optimizer",
    "train_step",
]


def pretrain(
    train_valid_test_datasets_provider: DatasetsProvider,
    model_provider: ModelProvider,
    model_type: ModelType | ForwardStep,
    forward_step: ForwardStep | None = None,
    process_non_loss_data_func: Callable[[Any, int, Any], None] | None = None,
    extra_args_provider: ExtraArgs | None = None,
    args_defaults: Mapping[str, Any] | None = None,
    get_embedding_ranks: Callable[..., Sequence[int]] | None = None,
    get_position_embedding_ranks: Callable[..., Sequence[int]] | None = None,
    non_loss_data_func: Callable[[list[nn.Module]], Any] | None = None,
    *,
    group_of: GroupRule = default_group,
    argv: Sequence[str] | None = None,
) -> None:
    """Train a model from the command line's settings. Every process of the job calls it.

    The order of the arguments is Megatron's; that of 2.5, which has no model_type, is understood too.
    Settings that cannot work end all processes with code 2, an error later on with code 1 and the message of the rank that had it;
    in a job of one process that error is raised, unless its message says what to change, as of a loss that is no number.

    train_valid_test_datasets_provider([n_train, n_valid, n_test]) -> three data sets (None for one that is not there), each
        with a length and items that are dictionaries of arrays
        Every rank calls it, whether or not it has Megatron's attribute `is_distributed`.
    model_provider(pre_process, post_process[, vp_stage]) -> this stage's part of the model
    forward_step(data_iterator, model) -> (output, loss_func); loss_func(output) -> (loss_sum, num_tokens, report)
    extra_args_provider(parser) adds flags of the script's own; args_defaults: settings by name, where the command line says nothing
    process_non_loss_data_func(data, iteration, writer), on the last rank after a validation: data is what non_loss_data_func(model
        chunks) returned, or else loss_func(output, non_loss_data=True) of each microbatch of one more batch; writer is None
    get_embedding_ranks, get_position_embedding_ranks: as `initialize_model_parallel` is given
    group_of(name, placement) -> how that parameter is updated
    """
    if forward_step is None or not isinstance(model_type, ModelType):
        forward_step, extra_args_provider, args_defaults = _without_model_type(
            model_type, forward_step or extra_args_provider, process_non_loss_data_func or args_defaults
        )
        process_non_loss_data_func = None
    began = time.monotonic()
    non_loss = NonLossData(process_non_loss_data_func, non_loss_data_func)
    runtime = trainer = None
    failed = False
    try:
        runtime = initialize_megatron(
            extra_args_provider,
            args_defaults,
            argv,
            get_embedding_ranks=get_embedding_ranks,
            get_position_embedding_ranks=get_position_embedding_ranks,
        )
        trainer = Trainer(
            runtime, train_valid_test_datasets_provider, model_provider, forward_step, group_of, began, non_loss
        )
        trainer.run()
    except Exception as error:
        set_runtime(None)
        is_refusal = isinstance(error, ConfigError | comm.PeerError) and not isinstance(error, comm.LostPeerError)
        if trainer is None and is_refusal:
            stop_with(error)
        if parallel_state.launched_world_size() == 1:
            parallel_state.stop_distributed()
            if failures.explains_itself(error):
                print(f"stopping, because {error}", file=sys.stderr, flush=True)
                sys.exit(1)
            raise
        failures.report(error)
        failed = True
    finally:
        if trainer is not None:
            trainer.watch.close()
        if runtime is not None:
            runtime.held.close()
        set_runtime(None)
    del trainer, runtime
    if failed:
        failures.leave()
    parallel_state.stop_distributed()


def _without_model_type(
    forward_step: Any, extra_args_provider: Any, args_defaults: Any
) -> tuple[ForwardStep, ExtraArgs | None, Mapping[str, Any] | None]:
    """The arguments of Megatron 2.5: pretrain(datasets_provider, model_provider, forward_step, extra_args_provider, args_defaults)."""
    if isinstance(forward_step, ModelType) or not callable(forward_step):
        raise TypeError(
            "pretrain() needs forward_step(data_iterator, model) -> (output, loss_func), after the model type"
        )
    return forward_step, extra_args_provider, args_defaults


@dataclass(frozen=True)
class NonLossData:
    """What a script wants to see of its model beside losses, after each validation."""

    process: Callable[[Any, int, Any], None] | None = None
    collect: Callable[[list[nn.Module]], Any] | None = None


class Trainer:
    """The parts of one run and the loop over its steps."""

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
        """began: `time.monotonic()` of the start of the run; now when unset."""
        self.non_loss = non_loss
        self.runtime, self.config, self.mesh = runtime, runtime.config, runtime.mesh
        self.batch_sizes, training = runtime.batch_sizes, runtime.config.training
        self.batch_size = self.batch_sizes.last  # of validation, and of training at the end of a ramp
        device = runtime.device.torch_device
        self.exits = Exits(training, self.mesh["world"], device, time.monotonic() if began is None else began)
        self.chunks, self.optimizer = build_model_and_optimizer(model_provider, runtime, group_of)
        self.memory = MemoryWatch(runtime, list(self.chunks.values()), self.optimizer)
        self.pipeline = self._build_pipeline(forward_step)
        with as_settings_problem():
            checkpointing.prepare_folder(self.config.checkpoint.save, self.mesh["world"], device, runtime.held)
            self.state, log_state = checkpointing.load(runtime, list(self.chunks.values()), self.optimizer)
            checkpointing.note_other_checkpoints(self.config.checkpoint.save, self.state.iteration, self.mesh["world"])
            self.train_iters = training.train_iters or self.state.iteration + self.batch_sizes.steps(
                self.state.consumed_train_samples, training.train_samples
            )
            self._set_schedules()
        flops = runtime.model_shape.flops_per_sample / runtime.world_size if self.config.log.log_throughput else None
        self.log = TrainingLog(self.train_iters, self.batch_size, self.config.log.log_interval, flops)
        if log_state is not None:
            self.log.load_state(log_state)
        self.datasets = dict(zip(("train", "valid", "test"), self._build_datasets(datasets_provider)))
        self._leave_out_small_sets()
        with comm.together(self.mesh["world"], device), as_settings_problem():
            self.watch = Watch(runtime, self.pipeline, list(self.chunks.values()), self.state)

    def _set_schedules(self) -> None:
        """Learning rate and weight decay by this run's settings, or by the checkpoint's where a flag asks for that."""
        config, length, state = self.config, self.runtime.run_length, self.state
        if length.unit == "iters":
            state.samples_per_iter = state.samples_per_iter or length.samples_per_iter
            length = replace(length, samples_per_iter=state.samples_per_iter)
        else:
            state.samples_per_iter = 0
        compared = config.checkpoint.load_optim and self._steps_left > 0
        saved = self.state.schedules if compared else {}

        def in_force(mine: AnySchedule, name: str) -> AnySchedule:
            plan = schedule_in_force(mine, saved.get(name), config.learning_rate, what=name.replace("_", " "))
            if saved.get(name, asdict(plan)) != asdict(plan):
                print_rank_0(f"the {name.replace('_', ' ')} follows this run's settings, not those of the checkpoint")
            return plan

        self.schedule = in_force(learning_rate_schedule(config.learning_rate, length), "learning_rate")
        self.weight_decay = in_force(config.optimizer.weight_decay_schedule(length.samples), "weight_decay")
        self.state.schedules = {"learning_rate": asdict(self.schedule), "weight_decay": asdict(self.weight_decay)}

    def _build_pipeline(self, forward_step: ForwardStep) -> Pipeline:
        runtime, config = self.runtime, self.config
        length = config.data.seq_length
        if config.parallel.sequence_parallel_on:
            length //= self.mesh["tp"].size
        micro_batch = config.training.micro_batch_size
        spec = TensorSpec((length, micro_batch, config.transformer.hidden_size), config.transformer.residual_dtype)
        return Pipeline(
            self.chunks,
            self.mesh,
            BatchShape(micro_batch, runtime.num_microbatches, config.data.seq_length),
            boundary=(spec,),
            forward_step=forward_step,
            keys=runtime.dropout_keys,
            weight_grads=runtime.weight_grads,
            schedule_name=config.schedule_name,
            copies_over=self.mesh["tp"] if self._scatters else None,
            device=runtime.device.torch_device,
            poison=config.data_parallel.poison_released_buffers,
        )

    @property
    def _scatters(self) -> bool:
        """Whether the tensor-parallel ranks hold copies of what passes between stages, to be sent in parts."""
        parallel = self.config.parallel
        return parallel.scatter_gather_tensors_in_pipeline and not parallel.sequence_parallel_on

    @property
    def _steps_left(self) -> int:
        """Steps that this run is to train."""
        return 0 if self.config.training.skip_train else max(self.train_iters - self.state.iteration, 0)

    def _build_datasets(self, provider: DatasetsProvider) -> tuple[Any, Any, Any]:
        state, before = self.state, self.state.requested_train_samples
        sizes = samples_to_request(self.config.training, self.train_iters, self.batch_size, state)
        if before and sizes[0] > before:
            print_rank_0(
                f"asking for {sizes[0]} training samples, and before for {before}: their order may not be the same"
            )
        state.requested_train_samples = sizes[0]
        steps = self._steps_left
        needed = self.batch_sizes.consumed_after(state.consumed_train_samples, steps)
        with comm.together(self.mesh["world"], self.runtime.device.torch_device), as_settings_problem():
            return check_datasets(provider(sizes), steps, needed, state)

    def _leave_out_small_sets(self) -> None:
        for split in ("valid", "test"):
            dataset = self.datasets[split]
            if dataset is not None and len(dataset) < self.batch_size:
                print_rank_0(f"{split} set of {len(dataset)} samples is left out: a global batch has {self.batch_size}")
                self.datasets[split] = None

    def run(self) -> None:
        """Train to the last step, then validate and test; or to where an exit flag says."""
        self._print_size()
        if self.config.training.skip_train:
            print_rank_0("not training, as --skip-train asks")
        elif reason := self._train():
            print_rank_0(f"exiting at iteration {self.state.iteration}, {reason}")
            return
        for split in ("valid", "test"):
            self._validate(
                split, f"iteration {self.state.iteration} on {'validation' if split == 'valid' else split} set"
            )

    def _train(self) -> str | None:
        """Why it stopped, if it did before the last step or on a signal; what it did is saved then, as at the end."""
        state, reason = self.state, None
        if state.iteration >= self.train_iters:
            print_rank_0(f"nothing left to train: iteration {state.iteration} of {self.train_iters} is done")
            return None
        data = self._iterators("train", state.consumed_train_samples)
        with self.exits.listening():
            while state.iteration < self.train_iters and reason is None:
                self._step(data)
                self._validate_if_due()
                last = state.iteration == self.train_iters
                reason = self.exits.reason(state.iteration, last=last)
                self._save_if_due(last=last or reason is not None)
        for chunk in self.chunks.values():
            chunk.finish_param_gather()
        return reason

    def _step(self, data: Mapping[int, Iterator | None]) -> None:
        state = self.state
        batch_size = self.batch_sizes.at(state.consumed_train_samples)
        with self.watch.step(state.iteration + 1), self.memory.step(state.iteration + 1):
            result = train_step(
                self.pipeline,
                self.optimizer,
                data,
                first_sample=state.consumed_train_samples,
                lr=self.schedule.at(state.scheduled_train_samples),
                decoupled_lr=self.schedule.decoupled_at(state.scheduled_train_samples),
                weight_decay=self.weight_decay.at(state.scheduled_train_samples),
                num_microbatches=batch_size // self.runtime.samples_at_once,
                check_finite=self.config.training.check_for_nan_in_loss_and_grad,
                timers=self.runtime.timers,
            )
        state.iteration += 1
        state.consumed_train_samples += batch_size
        state.scheduled_train_samples += 0 if result.skipped else self._scheduled(batch_size)
        self.log.add(result.losses, result.is_nan, skipped=result.skipped)
        self.log.pause()
        self.memory.report(state.iteration)
        measured = self.watch.measure()
        self.log.resume()
        lr = self.schedule.at(state.scheduled_train_samples)
        decoupled_lr = self.schedule.decoupled_at(state.scheduled_train_samples)
        interval = self.log.line_if_due(
            state.iteration,
            state.consumed_train_samples,
            lr,
            None if result.skipped else result.grad_norm,
            decoupled_lr=decoupled_lr,
            loss_scale=result.loss_scale,
            global_batch_size=batch_size,
            num_zeros=measured.num_zeros,
            params_norm=measured.params_norm,
        )
        self.log.pause()
        self.watch.report(result, interval, measured, lr=lr, decoupled_lr=decoupled_lr, global_batch_size=batch_size)
        self.log.resume()

    def _scheduled(self, batch_size: int) -> int:
        """What a step of this size counts in the schedules: an iteration is always as long as the run's first ones."""
        length = self.runtime.run_length
        return (
            batch_size * self.state.samples_per_iter // length.samples_per_iter
            if length.unit == "iters"
            else batch_size
        )

    def _validate_if_due(self) -> None:
        """After the last step there is one validation, that of the end of the run."""
        interval = self.config.training.eval_interval
        if self.state.iteration < self.train_iters and interval and self.state.iteration % interval == 0:
            self._validate("valid", f"iteration {self.state.iteration}")

    def _validate(self, split: str, where: str) -> None:
        training, dataset = self.config.training, self.datasets[split]
        if dataset is None or training.eval_iters == 0:
            return
        self.log.pause()
        # Which samples a validation reads follows from the step alone, so that a resumed run reads the same ones.
        in_training = split == "valid" and self.state.iteration and training.eval_interval
        number = (self.state.iteration - 1) // training.eval_interval if in_training else 0
        first_sample, num_batches = window(number, training.eval_iters, self.batch_size, len(dataset))
        losses = evaluate(
            self.pipeline,
            lambda first: self._iterators(split, first),
            num_batches=num_batches,
            first_sample=first_sample,
            global_batch_size=self.batch_size,
        )
        print_rank_last(validation_line(where, losses))
        self.watch.report_validation(split, losses, at_end=" on " in where)
        if self.non_loss.process is not None:
            self._show_non_loss_data(split, first_sample)
        self.log.resume()

    def _show_non_loss_data(self, split: str, first_sample: int) -> None:
        """Hand the script what it wants to see, on the last rank. All ranks take part in one more batch for it."""
        chunks, data = list(self.chunks.values()), []
        with torch.no_grad():
            if self.non_loss.collect is not None:
                data = self.non_loss.collect(chunks)
            else:
                step = keep_reports(self.pipeline.forward_step, data, non_loss=True)
                self.pipeline.evaluate(self._iterators(split, first_sample), first_sample, step)
        if is_last_rank():
            self.non_loss.process(data, self.state.iteration, None)

    def _save_if_due(self, *, last: bool) -> None:
        config = self.config.checkpoint
        due = config.save_interval is not None and self.state.iteration % config.save_interval == 0
        if config.save is None or not (due or last):
            return
        self.log.pause()
        checkpointing.save(self.runtime, list(self.chunks.values()), self.optimizer, self.state, self.log.state())
        self.watch.note_progress(f"Saved checkpoint\tIteration: {self.state.iteration}")
        self.log.resume()

    def _iterators(self, split: str, first_sample: int) -> dict[int, Iterator | None]:
        """Batches for each chunk, on the ranks that may read: the first of each tensor-parallel group. A stage between the ends
        has them too, for scripts that ask before they look where they are; nothing is read before it is asked for."""
        dp, kind = self.mesh["dp"], self.config.data.dataloader_type
        where = {
            "consumed_samples": first_sample,
            "micro_batch_size": self.config.training.micro_batch_size,
            "data_parallel_rank": dp.rank,
            "data_parallel_size": dp.size,
            "num_workers": self.config.data.num_workers,
        }
        return {
            stage: loader(kind, self.datasets[split], split, **where) if self.mesh["tp"].is_first else None
            for stage in self.chunks
        }

    def _print_size(self) -> None:
        """Count the model's parameters, each once, over all its ranks."""
        counts = [
            sum(
                _extent(t.pieces)
                for t in checkpointing.model_tensors(list(self.chunks.values()), self.mesh).values()
                if t.is_writer
            )
        ]
        total = torch.tensor(counts, dtype=torch.int64, device=self.runtime.device.torch_device)
        comm.all_reduce(total, self.mesh["world"])
        print_rank_0(f"model of {int(total.item()):,} parameters; training to iteration {self.train_iters}")
        chosen, dp = self.config.data_parallel, self.mesh["dp"]
        if dp.size > 1:
            flats = [flat for chunk in self.chunks.values() for flat in chunk.flats()]
            inner, m = self.mesh["dp_inner"].size, self.pipeline.batch.num_microbatches
            sizes = {"inner": inner, "outer": dp.size // inner, "microbatches": m}
            print_rank_0(traffic_line(flats, chosen.stage, **sizes, divides_outer=chosen.divides_over_outer))
        interval = self.config.log.log_interval
        if self._steps_left and self.state.iteration // interval == self.train_iters // interval:
            print_rank_0(f"no training line will come: none of the steps is a multiple of --log-interval {interval}")
        if self.state.iteration:
            print_rank_0(f"going on from iteration {self.state.iteration}")


def _extent(pieces: list) -> int:
    """Elements of the whole tensor in these pieces."""
    return sum(torch.Size(stop - start for start, stop in box).numel() for box, _ in pieces)
