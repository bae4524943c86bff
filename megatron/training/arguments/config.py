"""The configuration of a run has one dataclass per component. `validation` holds the rules between them."""

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import Annotated, Any, Literal

from megatron.core.base.dataclass_flags import (
    ConfigError,
    Count,
    FlagConfig,
    NotNegative,
    WholeNumber,
    changes,
    option,
    option_fields,
    title_of,
)
from megatron.core.base.global_batch_size_schedule import BatchSizes, constant_size, parse_sizes_by_tokens, ramp
from megatron.core.datasets.choose_masked_spans import MaskedDataConfig
from megatron.core.datasets.data_config import DataConfig
from megatron.core.datasets.fill_in_the_middle import FimConfig
from megatron.core.distributed.data_parallel_config import DataParallelConfig
from megatron.core.offload.optimizer_and_param_offload_config import OffloadConfig
from megatron.core.optimizer.loss_scaler import LossScaleConfig
from megatron.core.optimizer.lr_wd_schedule_by_samples import LearningRateConfig, RunLength
from megatron.core.optimizer.optimizer_flags_and_registry import OptimizerConfig
from megatron.core.parallel.device_and_process_group_config import DeviceConfig
from megatron.core.parallel.parallel_config import ParallelConfig
from megatron.core.parallel.parse_pipeline_layout_string import LAYOUT_FLAG, stages_of_layout
from megatron.core.parallel.stage_to_rank import StageMap
from megatron.core.pipeline_parallel.layer_split import split_by_layout, split_layers, split_two_stacks
from megatron.core.pipeline_parallel.schedule.registry import default_chunks, stage_map
from megatron.core.storage.path_or_url import is_url
from megatron.core.tokenizers.tokenizer_config_and_build import TokenizerConfig
from megatron.core.transformer.model_config import ModelConfig
from megatron.training.arguments.hang_config import HangConfig
from megatron.training.arguments.hf_export_config import HFConfig
from megatron.training.arguments.monitor_config import LogConfig, ProfileConfig, TensorBoardConfig
from megatron.training.arguments.nan_spike_and_corruption_config import GuardConfig
from megatron.training.arguments.parse_exit_signal_name import read_signal
from megatron.training.arguments.record_script_flags import OwnFlags
from megatron.training.arguments.unused_settings import unread_flags


@dataclass(frozen=True)
class TrainingConfig(FlagConfig):
    """Training."""

    micro_batch_size: Count | None = option(None, "samples per forward on each data-parallel rank", required=True)
    global_batch_size: Count | None = option(
        None, "samples per iteration over all ranks; default: --micro-batch-size x data-parallel size"
    )
    rampup_batch_size: list[int] | None = option(
        None,
        "START INCREMENT SAMPLES: grow the global batch size from START to --global-batch-size in steps of INCREMENT over "
        "SAMPLES samples; needs --train-samples",
        metavar="N",
    )
    step_batch_size_schedule: str | None = option(
        None,
        "list of TOKENS:SIZE: once TOKENS tokens are consumed, the global batch size is SIZE, e.g. '0:768 250B:1536 "
        "500B:3072' (suffixes K, M, B, T); needs --train-samples",
        metavar="TABLE",
    )
    decrease_batch_size_if_needed: bool = option(
        False, "round global batch sizes down to a multiple of --micro-batch-size x data-parallel size"
    )
    train_iters: Count | None = option(None, "number of training iterations; this or --train-samples is required")
    train_samples: Count | None = option(
        None, "number of training samples, instead of --train-iters; an incomplete last batch is dropped"
    )
    eval_interval: WholeNumber = option(1000, "iterations between validations; 0: validate only after training")
    eval_iters: WholeNumber = option(100, "global batches per validation; 0: no validation or test")
    eval_tasks: list[str] = option(
        [],
        "files of tasks, as the --data of tools/evaluate.py, that each validation also evaluates: texts, choices, "
        "continuations",
        metavar="FILE",
    )
    eval_tasks_limit: Count | None = option(None, "samples of each file of --eval-tasks; default: all")
    eval_global_batch_size: Count | None = option(
        None, "samples per global batch of validation and test; default: --global-batch-size"
    )
    eval_micro_batch_size: Count | None = option(
        None, "samples per forward of validation and test on each data-parallel rank; default: --micro-batch-size"
    )
    start_eval_at_iter: Count | None = option(
        None, "no validation before this iteration; default: from the first --eval-interval on"
    )
    skip_train: bool = option(False, "only validate and test the loaded weights")
    exit_interval: Count | None = option(None, "save and exit after an iteration divisible by this")
    exit_duration_in_mins: NotNegative | None = option(None, "save and exit after this many minutes")
    exit_signal_handler: bool = option(
        False,
        "on --exit-signal, SIGHUP (terminal lost) and SIGUSR1 (warning of the scheduler): finish the iteration on "
        "all ranks, save, and exit with code 0",
    )
    exit_signal: str = option(
        "SIGTERM", "signal that --exit-signal-handler handles, by name or number", metavar="NAME", read=read_signal
    )
    seed: Annotated[int, "[0, 2^32)"] = option(1234, "seed of initial weights, data order and dropout")
    check_for_nan_in_loss_and_grad: bool = option(True, "continue when a loss or gradient norm is NaN or infinite")

    def problems(self) -> Iterator[str]:
        if self.rampup_batch_size is not None and len(self.rampup_batch_size) != 3:
            numbers = " ".join(map(str, self.rampup_batch_size))
            yield f"--rampup-batch-size {numbers}: give three numbers, START INCREMENT SAMPLES"


@dataclass(frozen=True)
class CheckpointConfig(FlagConfig):
    """Checkpoints."""

    save: str | None = option(
        None, "checkpoint folder to write, or the URL of one in an object store, s3://BUCKET/FOLDER", metavar="DIR"
    )
    load: str | None = option(
        None,
        "checkpoint folder, or its URL, to resume from. If the folder is empty, the run starts at iteration 0; so it "
        "does if the folder is also the --save folder and has no checkpoint yet",
        metavar="DIR",
    )
    override_ckpt_iteration: WholeNumber | None = option(
        None,
        "number of the iteration as which a loaded checkpoint counts: steps and training samples are counted from there, "
        "while the learning rate goes on from the checkpoint's place in its schedule",
    )
    save_interval: Count | None = option(
        None,
        "iterations between checkpoints; the last iteration is always saved",
        flags=("--save-interval", "--persistent-save-interval"),
    )
    async_save: bool = option(
        False,
        "save in the background; training waits only while the state is copied to host memory, which takes as many "
        "bytes as a rank writes",
    )
    non_persistent_save_interval: Count | None = option(
        None,
        "iterations between non-persistent checkpoints, which replace one another and serve only to restart; none is "
        "written at an iteration that saves a checkpoint",
    )
    non_persistent_ckpt_type: Literal["local", "global", "in_memory"] | None = option(
        None,
        "where non-persistent checkpoints are written: local: on a disk of each machine; global: on a file "
        "system that all ranks share",
    )
    non_persistent_local_ckpt_dir: str | None = option(
        None,
        "folder of the non-persistent checkpoints of --non-persistent-ckpt-type local, on a disk of each machine or in "
        "its memory (/dev/shm/NAME)",
        metavar="DIR",
    )
    non_persistent_global_ckpt_dir: str | None = option(
        None,
        "folder of the non-persistent checkpoints of --non-persistent-ckpt-type global; default: the folder "
        "non_persistent in --save",
        metavar="DIR",
    )
    non_persistent_local_ckpt_algo: Literal["atomic", "fully_parallel"] = option(
        "atomic",
        "atomic: each rank writes all of its state to its own disk, and can resume without other machines' files",
    )
    ckpt_step: Count | None = option(None, "iteration of --load to resume from (default: the latest)")
    use_checkpoint_args: bool = option(
        False, "take model and tokenizer settings from the checkpoint, where flags do not give them"
    )
    use_mp_args_from_checkpoint_args: bool = option(
        False, "take the parallel sizes from the checkpoint, where flags do not give them"
    )
    hf_config: str | None = option(
        None,
        "Hugging Face config.json, or a folder with one: train the model it describes from scratch. It sets the "
        "model's flags that are not given; a given flag that contradicts it is an error. A tokenizer.json in the "
        "folder is used too",
        metavar="FILE",
    )
    exit_on_damaged_checkpoint: bool = option(
        False,
        "exit with an error if the checkpoint to resume from is damaged; by default the run resumes from the "
        "newest undamaged one",
    )
    keep_checkpoints: Count | None = option(
        None, "after a save, delete all but the newest N checkpoints that this run has saved; default: delete none"
    )
    save_retain_interval: Count | None = option(
        None,
        "never delete checkpoints whose iteration is a multiple of N; without --keep-checkpoints, all others but the "
        "newest are deleted",
    )
    save_optim: bool = option(
        True, "do not save optimizer state; resuming from such a checkpoint needs --no-load-optim"
    )
    save_frozen: bool = option(
        True,
        "do not save parameters that are not trained, such as the base of adapters; resuming from such a checkpoint "
        "needs the base as --pretrained-checkpoint",
    )
    pretrained_checkpoint: str | None = option(
        None,
        "checkpoint folder for the initial weights, used only if --load has no checkpoint; implies --finetune",
        metavar="DIR",
    )
    finetune: bool = option(False, "load weights only and start at iteration 0")
    load_optim: bool = option(True, "do not load optimizer state")
    exit_on_missing_checkpoint: bool = option(False, "exit with an error if --load has no checkpoint")
    allow_precision_change: bool = option(
        False, "resume from a checkpoint trained in another precision (--bf16, --fp16, --fp64, fp32)"
    )
    allow_rope_change: bool = option(
        False,
        "load weights of a model with other rotary settings (--rotary-base, --rope-scaling, --use-rope-scaling), for "
        "example to extend the context",
    )
    allow_tokenizer_change: bool = option(
        False, "load weights trained with another tokenizer of the same vocabulary size"
    )
    resize_token_embeddings: Literal["tokens", "ids"] | None = option(
        None,
        "load only weights, for another vocabulary: tokens: keep the embedding rows of tokens that both tokenizers "
        "have; ids: keep the rows of ids that both have; the other rows get initial values",
    )
    allow_missing_tensors: bool = option(
        False,
        "load only weights, also if the checkpoint lacks some of the model's tensors; each missing tensor is named "
        "and keeps its initial values",
    )

    dist_ckpt_strictness: Literal[
        "assume_ok_unexpected",
        "log_unexpected",
        "log_all",
        "raise_unexpected",
        "raise_all",
        "return_unexpected",
        "return_all",
        "ignore_all",
    ] = option(
        "raise_all",
        "when the checkpoint and the model differ in their parameters: raise_all: refuse it; raise_unexpected, "
        "assume_ok_unexpected: load it, with a WARNING, if it only has more parameters; log_unexpected, log_all, "
        "ignore_all: load it, with a WARNING, also if it lacks some, which keep their initial values, with new optimizer "
        "state",
    )

    def problems(self) -> Iterator[str]:
        if self.dist_ckpt_strictness.startswith("return_"):
            instead = self.dist_ckpt_strictness.replace("return_", "log_")
            yield (
                f"--dist-ckpt-strictness {self.dist_ckpt_strictness} returns names to a program that calls "
                f"megatron.core.dist_checkpointing.load, which a training run is not; give {instead}, which logs them"
            )
        if self.override_ckpt_iteration is not None and self.finetune:
            yield (
                "--override-ckpt-iteration says at which iteration a run goes on, but --finetune starts at iteration 0; "
                "leave one of them out"
            )
        kind = self.non_persistent_ckpt_type
        interval = self.non_persistent_save_interval
        if kind == "in_memory":
            yield (
                "--non-persistent-ckpt-type in_memory is not built: the memory of a process is lost when it ends; "
                "give local with --non-persistent-local-ckpt-dir /dev/shm/NAME, which is in memory and stays after "
                "the processes of a machine end"
            )
        if self.non_persistent_local_ckpt_algo != "atomic":
            yield (
                "--non-persistent-local-ckpt-algo fully_parallel is not built: it divides replicated state among "
                "ranks, so that each rank needs the disks of the others to resume; leave it out"
            )
        if (kind is None) != (interval is None):
            yield (
                "--non-persistent-save-interval N and --non-persistent-ckpt-type local or global need each "
                "other; give both"
            )
        if interval is not None and self.save is None:
            yield "--non-persistent-save-interval needs --save, the folder that records the latest checkpoint"
        for folder in (self.save, self.non_persistent_local_ckpt_dir, self.non_persistent_global_ckpt_dir):
            if interval is not None and folder is not None and is_url(folder):
                yield (
                    "--non-persistent-save-interval needs file systems with atomic renames for --save and for its "
                    f"own folder, but {folder} is an object store; leave out --non-persistent-save-interval"
                )
        if interval is not None and not self.save_optim:
            yield (
                "--no-save-optim saves no optimizer state, which a restart from a non-persistent checkpoint "
                "needs; leave out --non-persistent-save-interval"
            )
        if self.allow_tokenizer_change and self.resize_token_embeddings is not None:
            yield (
                "--allow-tokenizer-change keeps every row of the word embedding, but --resize-token-embeddings keeps "
                "only the rows of tokens or ids that both tokenizers have; leave one of them out"
            )
        if (kind == "local") != (self.non_persistent_local_ckpt_dir is not None):
            yield "--non-persistent-ckpt-type local and --non-persistent-local-ckpt-dir DIR need each other; give both"
        if kind != "global" and self.non_persistent_global_ckpt_dir is not None:
            yield "--non-persistent-global-ckpt-dir needs --non-persistent-ckpt-type global; give both"

    @property
    def loads_more_parameters(self) -> bool:
        """Whether a checkpoint is loaded that has parameters which the model lacks."""
        return self.dist_ckpt_strictness != "raise_all"

    @property
    def loads_fewer_parameters(self) -> bool:
        """Whether a checkpoint is loaded, also with its optimizer state, that lacks parameters of the model."""
        return self.dist_ckpt_strictness in ("log_unexpected", "log_all", "ignore_all")

    def copy_is_due(self, iteration: int) -> bool:
        """Whether a copy for restarts is due after this iteration. If a checkpoint is due too, only that is saved."""
        interval = self.non_persistent_save_interval
        return interval is not None and iteration % interval == 0

    @property
    def kept(self) -> int | None:
        """The number of newest checkpoints that are kept when a new one is saved; None: all."""
        if self.keep_checkpoints:
            return self.keep_checkpoints
        return 1 if self.save_retain_interval else None

    @property
    def without_effect(self) -> dict[str, str]:
        """The given flags that have no effect, with the reason."""
        if self.load is not None or self.pretrained_checkpoint is not None or self.hf_config is not None:
            return {}
        about_loading = {
            "--exit-on-damaged-checkpoint": self.exit_on_damaged_checkpoint,
            "--no-load-optim": not self.load_optim,
            "--allow-precision-change": self.allow_precision_change,
            "--allow-tokenizer-change": self.allow_tokenizer_change,
            "--resize-token-embeddings": self.resize_token_embeddings is not None,
            "--allow-rope-change": self.allow_rope_change,
            "--allow-missing-tensors": self.allow_missing_tensors,
            "--override-ckpt-iteration": self.override_ckpt_iteration is not None,
            "--dist-ckpt-strictness": self.dist_ckpt_strictness != "raise_all",
        }
        return {flag: "nothing is loaded without --load" for flag, given in about_loading.items() if given}


@dataclass(frozen=True)
class Config:
    """All settings, known before the first process group exists."""

    transformer: ModelConfig
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
    hf: HFConfig
    log: LogConfig
    tensorboard: TensorBoardConfig
    profile: ProfileConfig
    device: DeviceConfig
    guard: GuardConfig
    hangs: HangConfig
    own: OwnFlags = OwnFlags()  # of the script

    def data_parallel_size(self, world_size: int) -> int:
        return world_size // self.parallel.ranks_per_sample

    def samples_at_once(self, world_size: int) -> int:
        """Return the samples of one microbatch over all data-parallel ranks; a step's batch is a multiple of it."""
        return self.training.micro_batch_size * self.data_parallel_size(world_size)

    @property
    def eval_micro_batch_size(self) -> int:
        """Samples of one rank's forward of validation and test."""
        return self.training.eval_micro_batch_size or self.training.micro_batch_size

    def eval_samples_at_once(self, world_size: int) -> int:
        """Return the samples of one microbatch of validation and test over all data-parallel ranks."""
        return self.eval_micro_batch_size * self.data_parallel_size(world_size)

    def batch_sizes(self, world_size: int) -> BatchSizes:
        """Return the global batch size of each step. Raises ConfigError for an invalid ramp or table."""
        training = self.training
        at_once = self.samples_at_once(world_size)
        size = training.global_batch_size or at_once
        if training.step_batch_size_schedule is not None:
            sizes = parse_sizes_by_tokens(training.step_batch_size_schedule, self.data.seq_length)
        elif training.rampup_batch_size is not None:
            sizes = ramp(*training.rampup_batch_size, size)
        else:
            sizes = constant_size(size)
        if training.decrease_batch_size_if_needed:
            sizes = replace(sizes, multiple=at_once)
        return sizes

    def global_batch_size(self, world_size: int) -> int:
        """Return the samples of a training step at the end of a ramp."""
        return self.batch_sizes(world_size).last

    def eval_batch_size(self, world_size: int) -> int:
        """Return the samples of a global batch of validation and test."""
        return self.training.eval_global_batch_size or self.global_batch_size(world_size)

    def num_microbatches(self, world_size: int) -> int:
        """Return the microbatches per rank in one step, at the end of a ramp."""
        return self.global_batch_size(world_size) // self.samples_at_once(world_size)

    def train_iters(self, world_size: int) -> int:
        """Return the iterations of the whole run, from its start; 0 if --skip-train has none."""
        if self.training.train_iters or self.training.train_samples is None:
            return self.training.train_iters or 0
        return self.batch_sizes(world_size).steps(0, self.training.train_samples)

    def run_length(self, world_size: int) -> RunLength:
        """Return the length of the run, in the unit of its schedules.

        An iteration counts as many samples as the settings ask for, even if the batch is rounded down.
        """
        training = self.training
        if training.train_samples is not None:
            return RunLength(training.train_samples, "samples")
        count = training.train_iters or 1  # --skip-train needs no length
        return RunLength(count, "iters", self.batch_sizes(world_size).rows[-1][1])

    @property
    def validates(self) -> bool:
        """Whether a validation set would be read."""
        return self.training.eval_iters > 0 or self.data.full_validation

    @property
    def chunks_per_rank(self) -> int:
        """Model chunks (virtual stages) per pipeline rank. Raises ConfigError if the layers do not divide into them."""
        parallel = self.parallel
        num_layers = self.transformer.all_layers
        if parallel.pipeline_model_parallel_layout is not None:
            parts = stages_of_layout(parallel.pipeline_model_parallel_layout)
            chunks, rest = divmod(len(parts), parallel.pipeline_model_parallel_size)
            if rest:
                raise ConfigError(
                    f"{LAYOUT_FLAG} {parallel.pipeline_model_parallel_layout} has {len(parts)} stages; it must be a multiple "
                    f"of --pipeline-model-parallel-size ({parallel.pipeline_model_parallel_size}); change one"
                )
            return chunks
        if parallel.num_layers_per_virtual_pipeline_stage is None:
            return parallel.num_virtual_stages_per_pipeline_rank or default_chunks(parallel.pipeline_schedule)
        per_pass = parallel.num_layers_per_virtual_pipeline_stage * parallel.pipeline_model_parallel_size
        if num_layers % per_pass:
            raise ConfigError(
                f"--num-layers ({num_layers}) must be a multiple of {per_pass} = "
                f"--num-layers-per-virtual-pipeline-stage ({parallel.num_layers_per_virtual_pipeline_stage}) x "
                f"--pipeline-model-parallel-size ({parallel.pipeline_model_parallel_size}); change one"
            )
        return num_layers // per_pass

    @property
    def layer_split(self) -> list[range]:
        """The layer numbers, over the whole model, of each stage. Raises ValueError if the layers cannot be divided."""
        parallel = self.parallel
        model = self.transformer
        split = parallel.pipeline_model_parallel_split_rank
        if split is not None and model.decoder_layers:
            return split_two_stacks(model.num_layers, model.decoder_layers, self.stages, split)
        if parallel.pipeline_model_parallel_layout is not None:
            if model.decoder_layers:
                raise ValueError(
                    f"pipeline: {LAYOUT_FLAG} is for a model of one stack; leave it out for an encoder and decoder"
                )
            return split_by_layout(parallel.pipeline_model_parallel_layout, model.all_layers, self.stages.last + 1)
        return split_layers(
            model.all_layers,
            self.stages.last + 1,
            stages=self.stages,
            first=parallel.decoder_first_pipeline_num_layers,
            last=parallel.decoder_last_pipeline_num_layers,
            embedding_as_layer=parallel.account_for_embedding_in_pipeline_split,
            loss_as_layer=parallel.account_for_loss_in_pipeline_split,
        )

    @property
    def schedule_name(self) -> str:
        """The name of the pipeline schedule in use."""
        if self.parallel.pipeline_schedule:
            return self.parallel.pipeline_schedule
        return "1f1b" if self.chunks_per_rank == 1 else "interleaved"

    @property
    def stages(self) -> StageMap:
        """The pipeline rank of each stage.

        Raises ValueError for an unknown schedule, or sizes that it does not support.
        """
        return stage_map(self.schedule_name, self.parallel.pipeline_model_parallel_size, self.chunks_per_rank)

    @property
    def restarts_angles(self) -> bool:
        """Whether rotary angles restart with each document.

        They need not where attention stays within documents, since scores depend on the distances of tokens alone.
        """
        restarts = self.data.reset_position_ids and not self.data.masks_documents
        return restarts and bool(self.transformer.ropes)

    @property
    def positions(self) -> int:
        """The number of learned position embeddings."""
        if self.transformer.max_position_embeddings:
            return self.transformer.max_position_embeddings
        return max(self.data.seq_length, self.data.decoder_seq_length or 0)

    @property
    def without_effect(self) -> dict[str, str]:
        """The given flags that other settings make ineffective, with the reason."""
        reasons = self.parallel.without_effect | self.data.without_effect | self.tokenizer.without_effect

        # the bucket size
        data_parallel = self.data_parallel
        if data_parallel.ddp_bucket_size is not None and not data_parallel.cuts_by_size:
            reason = "a buffer is one bucket without --overlap-grad-reduce, --overlap-param-gather or --zero-stage 2"
            if data_parallel.stage == 3:
                reason = "ZeRO stage 3 reduces and gathers layer by layer"
            reasons["--ddp-bucket-size"] = reason

        # offload without anything to offload
        offload = self.offload
        offloads = offload.optimizer_offload_fraction or self.transformer.cpu_offloading_num_layers
        if offload.tier != "device" and not offloads:
            flag = "--offload-dir" if offload.tier == "file" else "--optimizer-cpu-offload"
            reasons[flag] = (
                "--optimizer-offload-fraction 0 offloads no masters or moments, and --cpu-offloading-num-layers is not given"
            )
        return reasons | unread_flags(self) | self.checkpoint.without_effect

    def component_values(self) -> dict[str, dict[str, Any]]:
        """Return every option's value by component."""
        values = {}
        for name, component in COMPONENTS.items():
            part = getattr(self, name)
            values[name] = {field.name: getattr(part, field.name) for field in option_fields(component)}
        return values

    def as_json(self) -> dict[str, dict[str, Any]]:
        """Return every option's value by component, and the script's own flags."""
        return self.component_values() | self.own.as_json()

    def changed_lines(self) -> list[str]:
        """Return lines for the start of the log.

        They have settings that are not at their default, by component, and all flags of the script.
        """
        # title -> setting -> (default, value)
        groups: dict[str, dict[str, tuple[Any, Any]]] = {}
        for name, component in COMPONENTS.items():
            groups[title_of(component)] = dict(sorted(changes(getattr(self, name)).items()))
        for title, flags in self.own.by_title().items():
            groups.setdefault(title, {}).update({flag.name: (flag.default, flag.value) for flag in flags})

        # one line for each setting, its value in a column
        width = max((len(name) for pairs in groups.values() for name in pairs), default=0)
        lines = []
        for title, pairs in groups.items():
            if pairs:
                lines.append(f"  {title}")
            for name, (default, value) in pairs.items():
                differs = f"  (default {shown(default)})" if default not in (None, value) else ""
                lines.append(f"    {name:<{width}}  {shown(value)}{differs}")
        return lines


def shown(value: Any) -> str:
    """Return a setting's value as on the command line."""
    if isinstance(value, list):
        return " ".join(map(str, value))
    return str(value)


COMPONENTS: dict[str, type] = {f.name: f.type for f in fields(Config) if f.name != "own"}  # type: ignore[misc]
