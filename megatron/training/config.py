"""The configuration of a run: every component's own, side by side, and the rules between them."""

from dataclasses import dataclass, fields
from typing import Any

from megatron.core.config import ConfigError, changes, knob, knobs
from megatron.core.datasets.data_config import DataConfig
from megatron.core.device import DeviceConfig
from megatron.core.distributed.distributed_data_parallel import DataParallelConfig
from megatron.core.optimizer.grad_scaler import LossScaleConfig
from megatron.core.optimizer.lr_schedule import LearningRateConfig, LearningRateSchedule
from megatron.core.optimizer.optimizer import OptimizerConfig
from megatron.core.parallel_state import ParallelConfig, grid_for
from megatron.core.pipeline_parallel.schedule import SCHEDULES
from megatron.core.pipeline_parallel.stage import split_layers
from megatron.core.tokenizers.tokenizer_config import TokenizerConfig
from megatron.core.transformer.transformer_config import TransformerConfig, tensor_parallel_problems


@dataclass(frozen=True)
class TrainingConfig:
    """Training."""

    micro_batch_size: int | None = knob(None, "samples in one forward of one rank")
    global_batch_size: int | None = knob(
        None, "samples in one step of all ranks; micro batch x data-parallel size when unset"
    )
    train_iters: int | None = knob(None, "steps in the whole run")
    eval_interval: int = knob(1000, "steps between validations")
    eval_iters: int = knob(100, "global batches in one validation; 0 for none")
    exit_interval: int | None = knob(None, "save and stop after the first step that is a multiple of this")
    seed: int = knob(1234, "of the initial weights, the data order and the dropout")
    check_for_nan_in_loss_and_grad: bool = knob(True, "go on when a gradient is not a finite number")

    def __post_init__(self) -> None:
        problems = [
            f"--{name.replace('_', '-')} is {getattr(self, name)}; it must be at least 1"
            for name in ("micro_batch_size", "global_batch_size", "train_iters", "eval_interval", "exit_interval")
            if getattr(self, name) is not None and getattr(self, name) < 1
        ]
        if self.eval_iters < 0:
            problems.append(f"--eval-iters is {self.eval_iters}; it must not be negative")
        if self.seed < 0 or self.seed >= 2**32:
            problems.append(f"--seed is {self.seed}; it must be in [0, 2^32)")
        if problems:
            raise ConfigError(problems)


@dataclass(frozen=True)
class CheckpointConfig:
    """Checkpoints."""

    save: str | None = knob(None, "folder to write checkpoints to")
    load: str | None = knob(None, "folder to go on from; a run without a checkpoint in it starts anew")
    save_interval: int | None = knob(None, "steps between checkpoints; the last step is always saved")
    finetune: bool = knob(False, "load the weights only and start at step 0")
    load_optim: bool = knob(True, "start the optimizer anew instead of loading its state")
    exit_on_missing_checkpoint: bool = knob(False, "stop if --load holds no checkpoint")

    def __post_init__(self) -> None:
        if self.save_interval is not None and self.save_interval < 1:
            raise ConfigError(f"--save-interval is {self.save_interval}; it must be at least 1")


@dataclass(frozen=True)
class LogConfig:
    """Logging."""

    log_interval: int = knob(100, "steps between log lines")

    def __post_init__(self) -> None:
        if self.log_interval < 1:
            raise ConfigError(f"--log-interval is {self.log_interval}; it must be at least 1")


@dataclass(frozen=True)
class Config:
    """Everything that is known before the first process group exists."""

    transformer: TransformerConfig
    parallel: ParallelConfig
    data_parallel: DataParallelConfig
    training: TrainingConfig
    learning_rate: LearningRateConfig
    optimizer: OptimizerConfig
    loss_scaling: LossScaleConfig
    data: DataConfig
    tokenizer: TokenizerConfig
    checkpoint: CheckpointConfig
    log: LogConfig
    device: DeviceConfig

    def data_parallel_size(self, world_size: int) -> int:
        return world_size // self.parallel.model_parallel_size

    def global_batch_size(self, world_size: int) -> int:
        """Samples of one step."""
        given = self.training.global_batch_size
        return given or self.training.micro_batch_size * self.data_parallel_size(world_size)

    def num_microbatches(self, world_size: int) -> int:
        """Forwards of one rank in one step."""
        samples_at_once = self.training.micro_batch_size * self.data_parallel_size(world_size)
        return self.global_batch_size(world_size) // samples_at_once

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
        """One line per setting that is not its default, for the start of the log."""
        pairs = {name: pair for part in fields(self) for name, pair in changes(getattr(self, part.name)).items()}
        width = max(map(len, pairs), default=0)
        return [f"  {name:<{width}}  {value}  (default {default})" for name, (default, value) in sorted(pairs.items())]


COMPONENTS: dict[str, type] = {f.name: f.type for f in fields(Config)}  # type: ignore[misc]


def check(config: Config, world_size: int) -> None:
    """Rules across components; all problems at once. Every rank calls, before anything communicates."""
    problems: list[str] = []
    required = {
        "--micro-batch-size": config.training.micro_batch_size,
        "--train-iters": config.training.train_iters,
        "--seq-length": config.data.seq_length,
        "--lr": config.learning_rate.lr,
    }
    problems += [f"{flag} is required" for flag, value in required.items() if value is None]
    problems += _data_problems(config)
    problems += _model_problems(config)
    problems += _batch_problems(config, world_size)
    problems += _schedule_problems(config)
    if config.checkpoint.save_interval is not None and config.checkpoint.save is None:
        problems.append("--save-interval needs --save, the folder to write to")
    if problems:
        raise ConfigError(problems)


def _data_problems(config: Config) -> list[str]:
    data, problems = config.data, []
    if data.data_path is None and not data.mock_data:
        problems.append("no data: give --data-path PREFIX, or --mock-data to try things out")
    if data.data_path is not None and data.mock_data:
        problems.append("--data-path and --mock-data exclude each other; give one")
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
    try:
        _ = config.layer_split
    except ValueError as error:
        problems.append(str(error))
    limit = model.max_position_embeddings
    if limit is not None and config.data.seq_length is not None and limit < config.data.seq_length:
        problems.append(f"--max-position-embeddings ({limit}) must be at least --seq-length ({config.data.seq_length})")
    return problems


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
        chunks = config.chunks_per_rank
    except ConfigError as error:
        return error.problems
    if chunks > 1 and stages == 1:
        return ["several chunks per rank need a pipeline: raise --pipeline-model-parallel-size to 2 or more"]
    if config.schedule_name not in SCHEDULES:
        return [f"--pipeline-schedule is {config.schedule_name}; it must be one of {', '.join(SCHEDULES)}"]
    if training.micro_batch_size is None:
        return []
    at_once = training.micro_batch_size * config.data_parallel_size(world_size)
    if config.global_batch_size(world_size) % at_once:
        return [
            f"--global-batch-size ({training.global_batch_size}) must be a multiple of {at_once} = --micro-batch-size "
            f"({training.micro_batch_size}) x data-parallel size ({config.data_parallel_size(world_size)})"
        ]
    try:
        SCHEDULES[config.schedule_name](stages, config.num_microbatches(world_size), chunks)
    except ValueError as error:
        return str(error).split("\n")
    return []


def _schedule_problems(config: Config) -> list[str]:
    """A learning rate that could not be followed. Iterations are the unit, whatever the batch."""
    if config.learning_rate.lr is None or config.training.train_iters is None:
        return []
    try:
        LearningRateSchedule(config.learning_rate, config.training.train_iters, global_batch_size=1)
    except ConfigError as error:
        return error.problems
    return []
