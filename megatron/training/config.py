"""The configuration of a run: every component's own, side by side, and the rules between them."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from megatron.core.batch_size import BatchSizes, constant_size, ramp, size_table
from megatron.core.config import ConfigError, changes, flags_of, knob, knobs, title_of
from megatron.core.datasets.data_config import DataConfig
from megatron.core.datasets.fim import FimConfig
from megatron.core.datasets.masked import MaskedDataConfig
from megatron.core.device import DeviceConfig
from megatron.core.distributed.distributed_data_parallel import DataParallelConfig
from megatron.core.offload.offload_config import OffloadConfig
from megatron.core.optimizer.grad_scaler import LossScaleConfig
from megatron.core.optimizer.lr_schedule import LearningRateConfig, RunLength, learning_rate_schedule
from megatron.core.optimizer.optimizer import OptimizerConfig
from megatron.core.parallel_state import ParallelConfig, grid_for
from megatron.core.pipeline_parallel.schedule import SCHEDULES
from megatron.core.pipeline_parallel.stage import split_layers
from megatron.core.tokenizers.tokenizer_config import TokenizerConfig
from megatron.core.transformer.transformer_config import TransformerConfig, tensor_parallel_problems
from megatron.training.watch_config import LogConfig, ProfileConfig, TensorBoardConfig, watch_problems


@dataclass(frozen=True)
class TrainingConfig:
    """Training."""

    micro_batch_size: int | None = knob(None, "samples in one forward of one rank", required=True)
    global_batch_size: int | None = knob(
        None, "samples in one step of all ranks; micro batch x data-parallel size when unset"
    )
    rampup_batch_size: list[int] | None = knob(
        None,
        "START INCREMENT SAMPLES: begin with steps of START samples and go to --global-batch-size by INCREMENT, in stages of "
        "equally many samples, SAMPLES in all; with --train-samples",
        metavar="N",
    )
    step_batch_size_schedule: str | None = knob(
        None,
        "sizes of the steps by the tokens consumed, such as '0:768 250B:1536 500B:3072' (suffixes K, M, B, T); with "
        "--train-samples, instead of --global-batch-size",
        metavar="TABLE",
    )
    decrease_batch_size_if_needed: bool = knob(
        False, "round step sizes down to a multiple of micro batch x data-parallel size instead of refusing them"
    )
    train_iters: int | None = knob(None, "steps in the whole run; this or --train-samples is required")
    train_samples: int | None = knob(
        None, "samples in the whole run, instead of --train-iters; an incomplete last step is left out"
    )
    eval_interval: int = knob(1000, "steps between validations; 0 for one at the end only")
    eval_iters: int = knob(
        100, "global batches in one validation, or all of a smaller set; 0 for no validation and no test"
    )
    skip_train: bool = knob(False, "do not train: validate and test the loaded weights")
    exit_interval: int | None = knob(None, "save and stop after the first step that is a multiple of this")
    exit_duration_in_mins: float | None = knob(
        None, "save and stop after the first step that ends so many minutes after the start"
    )
    exit_signal_handler: bool = knob(
        False, "on SIGTERM finish the step on all ranks, save, and end with exit code 0, as a cluster's time limit asks"
    )
    seed: int = knob(1234, "of the initial weights, the data order and the dropout")
    check_for_nan_in_loss_and_grad: bool = knob(True, "go on when a gradient is not a finite number")

    def __post_init__(self) -> None:
        problems = [
            f"--{name.replace('_', '-')} is {getattr(self, name)}; it must be at least 1"
            for name in ("micro_batch_size", "global_batch_size", "train_iters", "train_samples", "exit_interval")
            if getattr(self, name) is not None and getattr(self, name) < 1
        ]
        problems += [
            f"--{name.replace('_', '-')} is {getattr(self, name)}; it must not be negative"
            for name in ("eval_interval", "eval_iters", "exit_duration_in_mins")
            if getattr(self, name) is not None and not getattr(self, name) >= 0
        ]
        if self.rampup_batch_size is not None and len(self.rampup_batch_size) != 3:
            given = " ".join(map(str, self.rampup_batch_size))
            problems.append(f"--rampup-batch-size {given}: it takes three numbers, START INCREMENT SAMPLES")
        if self.seed < 0 or self.seed >= 2**32:
            problems.append(f"--seed is {self.seed}; it must be in [0, 2^32)")
        if problems:
            raise ConfigError(problems)


@dataclass(frozen=True)
class CheckpointConfig:
    """Checkpoints."""

    save: str | None = knob(None, "folder to write checkpoints to", metavar="DIR")
    load: str | None = knob(
        None, "folder to go on from; the run starts anew if there is nothing in it yet, or if it is that of --save",
        metavar="DIR",
    )  # fmt: skip
    save_interval: int | None = knob(
        None, "steps between checkpoints; the last step is always saved",
        flags=("--save-interval", "--persistent-save-interval"),
    )  # fmt: skip
    save_optim: bool = knob(
        True, "leave the optimizer's state out of checkpoints; --no-load-optim goes on from such a one"
    )
    pretrained_checkpoint: str | None = knob(
        None,
        "folder whose weights a run starts from, as with --finetune, while --load holds no checkpoint",
        metavar="DIR",
    )
    finetune: bool = knob(False, "load the weights only and start at step 0")
    load_optim: bool = knob(True, "start the optimizer anew instead of loading its state")
    exit_on_missing_checkpoint: bool = knob(False, "stop if --load holds no checkpoint")

    def __post_init__(self) -> None:
        problems = []
        if self.save_interval is not None and self.save_interval < 1:
            problems.append(f"--save-interval is {self.save_interval}; it must be at least 1")
        if problems:
            raise ConfigError(problems)


@dataclass(frozen=True)
class Config:
    """Everything that is known before the first process group exists."""

    transformer: TransformerConfig
    parallel: ParallelConfig
    data_parallel: DataParallelConfig
    training: TrainingConfig
    learning_rate: LearningRateConfig
    optimizer: OptimizerConfig
    offload: OffloadConfig
    loss_scaling: LossScaleConfig
    data: DataConfig
    fim: FimConfig
    masked_data: MaskedDataConfig
    tokenizer: TokenizerConfig
    checkpoint: CheckpointConfig
    log: LogConfig
    tensorboard: TensorBoardConfig
    profile: ProfileConfig
    device: DeviceConfig

    def data_parallel_size(self, world_size: int) -> int:
        return world_size // self.parallel.model_parallel_size

    def samples_at_once(self, world_size: int) -> int:
        """Samples of one micro-batch of every rank, of which a step has a multiple."""
        return self.training.micro_batch_size * self.data_parallel_size(world_size)

    def batch_sizes(self, world_size: int) -> BatchSizes:
        """Samples of each step. Raises ConfigError for a ramp or a table that cannot be."""
        training, at_once = self.training, self.samples_at_once(world_size)
        size = training.global_batch_size or at_once
        if training.step_batch_size_schedule is not None:
            sizes = size_table(training.step_batch_size_schedule, self.data.seq_length)
        elif training.rampup_batch_size is not None:
            sizes = ramp(*training.rampup_batch_size, size)
        else:
            sizes = constant_size(size)
        return replace(sizes, multiple=at_once) if training.decrease_batch_size_if_needed else sizes

    def global_batch_size(self, world_size: int) -> int:
        """Samples of one step, at the end of a ramp, and of one step of validation."""
        return self.batch_sizes(world_size).last

    def num_microbatches(self, world_size: int) -> int:
        """Forwards of one rank in one step, at the end of a ramp."""
        return self.global_batch_size(world_size) // self.samples_at_once(world_size)

    def train_iters(self, world_size: int) -> int:
        """Steps of the whole run, made from its start."""
        training = self.training
        return training.train_iters or self.batch_sizes(world_size).steps(0, training.train_samples)

    def run_length(self, world_size: int) -> RunLength:
        """What schedules are measured by: the size that was asked for is their unit, also where a smaller one runs."""
        training = self.training
        if training.train_samples is not None:
            return RunLength(training.train_samples, "samples")
        return RunLength(training.train_iters, "iters", self.batch_sizes(world_size).rows[-1][1])

    @property
    def chunks_per_rank(self) -> int:
        """Model chunks (virtual stages) of each pipeline rank. Raises ConfigError when the layers cannot be divided so."""
        parallel, num_layers = self.parallel, self.transformer.num_layers
        if parallel.num_layers_per_virtual_pipeline_stage is None:
            return parallel.num_virtual_stages_per_pipeline_rank or 1
        per_pass = parallel.num_layers_per_virtual_pipeline_stage * parallel.pipeline_model_parallel_size
        if num_layers % per_pass:
            raise ConfigError(
                f"--num-layers ({num_layers}) must be a multiple of {per_pass} = --num-layers-per-virtual-pipeline-stage "
                f"({parallel.num_layers_per_virtual_pipeline_stage}) x --pipeline-model-parallel-size "
                f"({parallel.pipeline_model_parallel_size})"
            )
        return num_layers // per_pass

    @property
    def layer_split(self) -> list[range]:
        """The global numbers of the layers of each stage. Raises ValueError when they cannot be divided so."""
        parallel = self.parallel
        return split_layers(
            self.transformer.num_layers,
            parallel.pipeline_model_parallel_size * self.chunks_per_rank,
            num_ranks=parallel.pipeline_model_parallel_size,
            first=parallel.decoder_first_pipeline_num_layers,
            last=parallel.decoder_last_pipeline_num_layers,
            embedding_as_layer=parallel.account_for_embedding_in_pipeline_split,
            loss_as_layer=parallel.account_for_loss_in_pipeline_split,
        )

    @property
    def schedule_name(self) -> str:
        """The pipeline schedule that runs."""
        return self.parallel.pipeline_schedule or ("1f1b" if self.chunks_per_rank == 1 else "interleaved")

    @property
    def positions(self) -> int:
        """Rows of a learned position table."""
        return self.transformer.max_position_embeddings or self.data.seq_length

    def as_json(self) -> dict[str, dict[str, Any]]:
        return {
            part.name: {
                f.name: getattr(getattr(self, part.name), f.name) for f in knobs(type(getattr(self, part.name)))
            }
            for part in fields(self)
        }

    def changed_lines(self) -> list[str]:
        """One line per setting that is not its default, under the name of its component, for the start of the log."""
        changed = {part.name: changes(getattr(self, part.name)) for part in fields(self)}
        width = max((len(name) for pairs in changed.values() for name in pairs), default=0)
        lines = []
        for part, pairs in changed.items():
            lines += [f"  {title_of(COMPONENTS[part])}"] if pairs else []
            lines += [f"    {name:<{width}}  {_shown(*pair)}" for name, pair in sorted(pairs.items())]
        return lines


def _shown(default: Any, value: Any) -> str:
    """A value beside its default, where there is one."""
    text = " ".join(map(str, value)) if isinstance(value, list) else str(value)
    return text if default is None else f"{text}  (default {default})"


COMPONENTS: dict[str, type] = {f.name: f.type for f in fields(Config)}  # type: ignore[misc]


def check(config: Config, world_size: int) -> None:
    """Rules across components; all problems at once. Every rank calls, before anything communicates."""
    problems = _missing(config)
    problems += _data_problems(config)
    problems += _model_problems(config)
    problems += _batch_problems(config, world_size)
    problems += _unit_problems(config)
    problems += _schedule_problems(config)
    if config.checkpoint.save_interval is not None and config.checkpoint.save is None:
        problems.append("--save-interval needs --save, the folder to write to")
    if config.training.skip_train and config.training.eval_iters == 0 and config.checkpoint.load is None:
        problems.append(
            "--skip-train with --eval-iters 0 leaves nothing to do; raise --eval-iters to validate (--load says what), or leave out "
            "--skip-train to train"
        )
    if config.offload.offload_params and config.data_parallel.stage < 3:
        problems.append(
            f"--offload-params keeps shards of parameters, and in ZeRO stage {config.data_parallel.stage} there are none; give "
            "--zero-stage 3, or leave it out"
        )
    problems += watch_problems(
        config.log, config.tensorboard, config.profile, save=config.checkpoint.save, world_size=world_size
    )
    if problems:
        raise ConfigError(problems)


def _missing(config: Config) -> list[str]:
    """The settings that no run can do without, and this one lacks."""
    parts = [getattr(config, part.name) for part in fields(config)]
    lacks = [f for part in parts for f in knobs(type(part)) if f.metadata["required"] and getattr(part, f.name) is None]
    problems = [f"{flags_of(f)[0]} is required" for f in lacks]
    if config.training.train_iters is None and config.training.train_samples is None:
        problems.append("--train-iters (or --train-samples) is required")
    return problems


def flags_in(problems: Iterable[str]) -> set[str]:
    """The flags that messages name."""
    return {flag for problem in problems for flag in re.findall(r"--[\w-]*\w", problem)}


def apart_from(known: Sequence[str], parts: Mapping[str, Any], found: Sequence[str]) -> list[str]:
    """Of what was found with defaults for the components that are not in `parts`, whatever cannot follow from these defaults, nor
    from the problems `known`: it shares no flag with them."""
    failed = [name for name in COMPONENTS if name not in parts]
    doubtful = flags_in(known) | {
        flag for name in failed for field in knobs(COMPONENTS[name]) for flag in flags_of(field)
    }
    words = ("world size", "data-parallel size") if "parallel" in failed else ()
    return [problem for problem in found if not flags_in([problem]) & doubtful and not any(w in problem for w in words)]


def _data_problems(config: Config) -> list[str]:
    problems = config.data.source_problems()
    if config.fim.fim_data and config.data.mock_data:
        problems.append("--fim-data rearranges text, which --mock-data has none of; leave one of them out")
    if config.tokenizer.tokenizer_type is None:
        problems.append("--tokenizer-type is required (NullTokenizer with --vocab-size for data without text)")
    return problems


def _model_problems(config: Config) -> list[str]:
    model, tensor = config.transformer, config.parallel.tensor_model_parallel_size
    problems = tensor_parallel_problems(model, tensor)
    if config.parallel.sequence_parallel_on and (config.data.seq_length or 0) % tensor:
        problems.append(
            f"--sequence-parallel divides --seq-length ({config.data.seq_length}) over --tensor-model-parallel-size ({tensor}), "
            "which does not divide it; change one"
        )
    if config.data_parallel.main_grads_dtype == "bf16" and not model.bf16:
        problems.append("--main-grads-dtype bf16 is for models of --bf16; give that too, or leave it out")
    if model.distribute_saved_activations and (tensor == 1 or config.parallel.sequence_parallel_on):
        problems.append(
            "--distribute-saved-activations divides what tensor-parallel ranks hold copies of; leave it out "
            + (
                "with --sequence-parallel, where they hold parts"
                if tensor > 1
                else "or use --tensor-model-parallel-size"
            )
        )
    problems += _layer_problems(config)
    limit = model.max_position_embeddings
    if limit is not None and config.data.seq_length is not None and limit < config.data.seq_length:
        problems.append(f"--max-position-embeddings ({limit}) must be at least --seq-length ({config.data.seq_length})")
    return problems


_MOST_ACTIONS = 1_000_000  # of a schedule, which every rank holds whole: some 300 MB once its transfers are added


def _layer_problems(config: Config) -> list[str]:
    """Layers that cannot be dealt out to the stages, or computed again in the groups asked for."""
    try:
        largest = max(map(len, config.layer_split))
    except ValueError as error:
        return str(error).split("\n")
    recomputed = config.transformer.recompute_num_layers
    if recomputed is not None and recomputed > largest:
        return [
            f"--recompute-num-layers is {recomputed}; it must be at most {largest}, the layers of the largest stage"
        ]
    return []


def _batch_problems(config: Config, world_size: int) -> list[str]:
    """What does not come out even between the ranks, the layers and the batch."""
    parallel, training = config.parallel, config.training
    stages = parallel.pipeline_model_parallel_size
    try:
        grid_for(
            world_size,
            tensor=parallel.tensor_model_parallel_size,
            pipeline=stages,
            replicas=config.data_parallel.num_distributed_optimizer_instances,
        )
    except ConfigError as error:
        return error.problems
    try:
        chunks = config.chunks_per_rank
    except ConfigError:
        return []  # which `_layer_problems` says
    if chunks > 1 and stages == 1:
        return ["several chunks per rank need a pipeline: raise --pipeline-model-parallel-size to 2 or more"]
    if config.schedule_name not in SCHEDULES:
        return [f"--pipeline-schedule is {config.schedule_name}; it must be one of {', '.join(SCHEDULES)}"]
    if training.micro_batch_size is None:
        return []
    if training.step_batch_size_schedule is not None and config.data.seq_length is None:
        return []
    try:
        sizes = config.batch_sizes(world_size).sizes
    except ConfigError as error:
        return error.problems
    if problem := _size_problem(config, sizes, world_size):
        return [problem]
    if training.train_samples is not None and config.train_iters(world_size) < 1:
        return [f"--train-samples ({training.train_samples}) do not fill one step of {sizes[0]}; raise it"]
    most = max(sizes) // config.samples_at_once(world_size)
    actions = 2 * most * stages * chunks
    if actions > _MOST_ACTIONS:  # which is said without making them
        return [
            f"--global-batch-size ({max(sizes)}) makes {most:,} microbatches per rank and step, whose schedule has {actions:,} "
            f"forwards and backwards over all stages, and {_MOST_ACTIONS:,} is the most; lower it, or raise --micro-batch-size or "
            "the number of data-parallel ranks"
        ]
    for size in sorted(set(sizes)):
        try:
            SCHEDULES[config.schedule_name](stages, size // config.samples_at_once(world_size), chunks)
        except ValueError as error:
            where = f"steps of {size} samples: " if len(sizes) > 1 else ""
            return [where + problem for problem in str(error).split("\n")]
    return []


def _size_problem(config: Config, sizes: list[int], world_size: int) -> str | None:
    """What is wrong with the sizes of steps; found before the run, and not when it comes to a size."""
    training, at_once = config.training, config.samples_at_once(world_size)
    product = (
        f"{at_once} = --micro-batch-size ({training.micro_batch_size}) x data-parallel size "
        f"({config.data_parallel_size(world_size)})"
    )
    if training.decrease_batch_size_if_needed:
        return None if all(sizes) else f"steps must have at least {product} samples; raise the smallest step size"
    uneven = [str(size) for size in sizes if size % at_once]
    if not uneven:
        return None
    if len(sizes) == 1:
        return f"--global-batch-size ({training.global_batch_size}) must be a multiple of {product}"
    flag = "--rampup-batch-size" if training.rampup_batch_size else "--step-batch-size-schedule"
    listed = ", ".join(uneven[:5]) + (f" and {len(uneven) - 5} more sizes" if len(uneven) > 5 else "")
    return f"{flag} makes steps of {listed} samples, which must be multiples of {product}; change one" + (
        " or give --decrease-batch-size-if-needed" if training.rampup_batch_size else ""
    )


def _unit_problems(config: Config) -> list[str]:
    """A run counts in iterations or in samples, and so do all its settings."""
    training, rate, problems = config.training, config.learning_rate, []
    pairs = {  # what counts iterations, and what counts samples
        "--lr-decay": (rate.lr_decay_iters, rate.lr_decay_samples),
        "--lr-warmup": (rate.lr_warmup_iters, rate.lr_warmup_samples),
        "--lr-wsd-decay": (rate.lr_wsd_decay_iters, rate.lr_wsd_decay_samples),
    }
    if training.train_iters is not None and training.train_samples is not None:
        return ["--train-iters and --train-samples exclude each other; give one"]
    if training.train_iters is not None:
        given = [flag for flag, (_, samples) in pairs.items() if samples]
        problems += [f"{flag}-samples needs --train-samples; with --train-iters give {flag}-iters" for flag in given]
        ramps = {
            "--rampup-batch-size": training.rampup_batch_size,
            "--step-batch-size-schedule": training.step_batch_size_schedule,
        }
        problems += [
            f"{flag} needs --train-samples instead of --train-iters"
            for flag, value in ramps.items()
            if value is not None
        ]
    if training.train_samples is not None:
        given = [flag for flag, (iters, _) in pairs.items() if iters]
        problems += [f"{flag}-iters needs --train-iters; with --train-samples give {flag}-samples" for flag in given]
    if training.step_batch_size_schedule is not None:
        others = {
            "--global-batch-size": training.global_batch_size,
            "--rampup-batch-size": training.rampup_batch_size,
            "--decrease-batch-size-if-needed": training.decrease_batch_size_if_needed or None,
        }
        problems += [
            f"--step-batch-size-schedule and {flag} exclude each other; give one"
            for flag, value in others.items()
            if value is not None
        ]
    if training.rampup_batch_size is not None and training.global_batch_size is None:
        problems.append("--rampup-batch-size needs --global-batch-size, the size it ends with")
    return problems


def _schedule_problems(config: Config) -> list[str]:
    """A learning rate that could not be followed, whatever the batch."""
    training = config.training
    if config.learning_rate.lr is None or not (training.train_iters or training.train_samples):
        return []
    unit = "iters" if training.train_iters else "samples"
    try:
        learning_rate_schedule(config.learning_rate, RunLength(training.train_iters or training.train_samples, unit))
    except ConfigError as error:
        return error.problems
    return []
