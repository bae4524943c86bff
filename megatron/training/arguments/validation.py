"""Rules between the components of a configuration. All problems are found before a process group exists."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from typing import Any

from megatron.core.base.dataclass_flags import ConfigError, flag_of, flags_of, option_fields
from megatron.core.base.error_reporting import is_user_error
from megatron.core.dist_checkpointing.format import iteration_of
from megatron.core.optimizer.lr_schedule import RunLength, learning_rate_schedule
from megatron.core.pipeline_parallel.schedule.registry import SCHEDULES
from megatron.core.pipeline_parallel.schedule.simulate import make_schedule
from megatron.core.storage.paths import holds, is_url, path_of, same_folder
from megatron.core.transformer.context_parallel_rules import context_parallel_problems
from megatron.core.transformer.model_config import tensor_parallel_problems
from megatron.training.arguments.config import COMPONENTS, Config
from megatron.training.arguments.monitor_config import watch_problems


def check(config: Config, world_size: int) -> None:
    """Raise ConfigError with all violated rules at once. Every rank calls it, before anything communicates."""
    rules = (
        _missing,
        _data_problems,
        _model_problems,
        _optimizer_problems,
        _batch_problems,
        _unit_problems,
        _schedule_problems,
    )
    rules += (_checkpoint_problems, _url_problems, _guard_problems, _watch_problems)
    if problems := [problem for rule in rules for problem in rule(config, world_size)]:
        raise ConfigError(problems)


def _checkpoint_problems(config: Config, _: int) -> Iterator[str]:
    """Flags about checkpoints that need another flag: a run that starts anew by mistake costs more than a refused run."""
    checkpoint, stage = config.checkpoint, config.data_parallel.stage
    about_saving = ("save_interval", "keep_checkpoints", "save_retain_interval")
    for name in about_saving if checkpoint.save is None else ():
        if getattr(checkpoint, name) is not None:
            yield f"{flag_of(name)} needs --save, the folder to write to"
    for name in ("use_checkpoint_args", "use_mp_args_from_checkpoint_args"):
        if getattr(checkpoint, name) and checkpoint.load is None and checkpoint.pretrained_checkpoint is None:
            yield f"{flag_of(name)} needs --load, the folder whose settings are taken"
    if checkpoint.async_save and checkpoint.save is None:
        yield "--async-save needs --save, the folder to write to"
    if checkpoint.load is None and checkpoint.ckpt_step is not None:
        yield "--ckpt-step needs --load, the folder that holds the iteration"
    if checkpoint.load is None and checkpoint.finetune and checkpoint.pretrained_checkpoint is None:
        yield "--finetune needs weights to load: give --load DIR, or leave it out to start from initial weights"
    if checkpoint.finetune and config.learning_rate.use_checkpoint_opt_param_scheduler:
        yield (
            "--use-checkpoint-opt_param-scheduler goes on with the schedules of the checkpoint's run, and "
            "--finetune takes its "
            "weights alone and begins at iteration 0; leave one of them out"
        )
    if checkpoint.load is None and checkpoint.exit_on_missing_checkpoint:
        yield "--exit-on-missing-checkpoint needs --load, the folder whose checkpoint may be missing"
    if checkpoint.load is None and config.training.skip_train and not config.validates:
        yield (
            "--skip-train with --eval-iters 0 leaves nothing to do; raise --eval-iters to validate (with --load "
            "DIR), or leave "
            "out --skip-train to train"
        )
    if config.hf.save_hf is not None and config.training.skip_train:
        yield "--save-hf writes what a run has trained, and --skip-train trains nothing; leave one of them out"
    for name in ("save", "load", "pretrained_checkpoint"):
        folder, hf = getattr(checkpoint, name), config.hf.save_hf
        if folder and hf and same_folder(folder, hf):
            yield f"--save-hf is the folder of {flag_of(name)}, {folder}; give a folder of its own"
        elif folder and hf and name != "save" and holds(hf, folder):
            yield (
                f"{flag_of(name)} {folder} is one of the folders of --save-hf {hf}, and this run would replace it where "
                "it comes to that iteration; give --save-hf another folder"
            )
    save, hf = checkpoint.save, config.hf.save_hf
    if save and hf and iteration_of(path_of(hf).name) is not None and holds(save, hf):
        yield f"--save-hf {hf} has the name of a checkpoint of --save {save}; give another, such as {save}/hf"
    if config.offload.offload_params and stage < 3:
        yield (
            f"--offload-params offloads parameter shards, and ZeRO stage {stage} has none; give --zero-stage 3, or leave it out"
        )


def _url_problems(config: Config, _: int) -> Iterator[str]:
    """URLs of object stores that this installation cannot read, and those where a folder of this machine is needed."""
    save = config.checkpoint.save
    for part in (getattr(config, part.name) for part in fields(config)):
        for field in (field for field in option_fields(type(part)) if field.metadata.get("metavar") == "DIR"):
            given = getattr(part, field.name)
            if given is None or not is_url(given):
                continue
            if field.name not in ("save", "load", "pretrained_checkpoint"):
                yield f"{flags_of(field)[0]} {given} is a URL, and what goes there needs a folder of this machine; give one"
                continue
            try:
                path_of(given)
            except ConfigError as error:
                yield f"{flags_of(field)[0]} {error}"
    if save is None or not is_url(save):
        return
    if config.log.log_progress:
        yield f"--log-progress adds lines to a file beside the checkpoints, and --save {save} takes whole objects; leave it out"
    if config.profile.profile and config.tensorboard.tensorboard_dir is None:
        yield f"--profile needs a folder of this machine for its trace, and --save {save} is none; give --tensorboard-dir"


def _guard_problems(config: Config, _: int) -> Iterator[str]:
    guard, training = config.guard, config.training
    if guard.iterations_to_skip and config.data.dataloader_type == "external":
        yield (
            "--iterations-to-skip passes over samples by their number, and --dataloader-type external has none; "
            "leave one of "
            "them out"
        )
    folders = {"--save": config.checkpoint.save, "--load": config.checkpoint.load}
    for flag, folder in folders.items():
        if folder and guard.bad_step_dir and same_folder(folder, guard.bad_step_dir):
            yield f"--bad-step-dir is the folder of {flag}, whose latest checkpoint a dump without optimizer state would become"
    if guard.nan_action != "stop" and not training.check_for_nan_in_loss_and_grad:
        yield "--nan-action skip needs the check that --no-check-for-nan-in-loss-and-grad switches off; leave one of them out"
    if guard.spike_action != "report" and not (guard.check_for_spiky_loss or guard.check_for_large_grads):
        yield f"--spike-action {guard.spike_action} needs --check-for-spiky-loss or --check-for-large-grads"


def _watch_problems(config: Config, world_size: int) -> Iterator[str]:
    parts = config.log, config.tensorboard, config.profile
    return watch_problems(*parts, save=config.checkpoint.save, world_size=world_size)


def _missing(config: Config, _: int) -> Iterator[str]:
    """Required settings that are not given."""
    for part in (getattr(config, part.name) for part in fields(config)):
        lacks = (f for f in option_fields(type(part)) if f.metadata["required"] and getattr(part, f.name) is None)
        yield from (f"{flags_of(f)[0]} is required" for f in lacks)
    if config.training.train_iters is None and config.training.train_samples is None:
        yield "--train-iters (or --train-samples) is required"


def flags_in(problems: Iterable[str]) -> set[str]:
    """The flags named in messages."""
    return {flag for problem in problems for flag in re.findall(r"--[\w-]*\w", problem)}


def filled_in(parts: Mapping[str, Any]) -> Config:
    """A config of these components and defaults for the others, to check rules although a component is invalid."""
    return Config(**parts, **{name: component() for name, component in COMPONENTS.items() if name not in parts})


def apart_from(known: Sequence[str], parts: Mapping[str, Any], found: Sequence[str]) -> list[str]:
    """The problems in `found` that are real although `filled_in` used defaults for the components missing in `parts`.

    A problem is dropped if it names a flag of a missing component, or of the problems `known`.
    """
    failed = [name for name in COMPONENTS if name not in parts]
    missing = {flag for name in failed for field in option_fields(COMPONENTS[name]) for flag in flags_of(field)}
    doubtful = flags_in(known) | missing
    words = ("world size", "data-parallel size") if "parallel" in failed else ()
    return [problem for problem in found if not flags_in([problem]) & doubtful and not any(w in problem for w in words)]


def _data_problems(config: Config, _: int) -> Iterator[str]:
    data = config.data
    unclear = data.source_problems(needed=False)
    yield from unclear or data.validation_problems()
    if data.full_validation and data.mock_data and config.training.eval_iters == 0:
        yield (
            "--full-validation reads --mock-data, which have no end, for --eval-iters batches, and that is 0; "
            "raise --eval-iters"
        )
    if config.fim.fim_data and config.data.mock_data:
        yield "--fim-data rearranges text, and --mock-data has no text; leave one of them out"


def _model_problems(config: Config, _: int) -> Iterator[str]:
    model, tensor = config.transformer, config.parallel.tensor_model_parallel_size
    length, is_divided = config.data.seq_length, config.parallel.sequence_parallel_on
    yield from tensor_parallel_problems(model, tensor)
    lengths = {"--seq-length": length, "--decoder-seq-length": config.data.decoder_seq_length}
    yield from context_parallel_problems(config.parallel, model, lengths)
    if is_divided and (length or 0) % tensor:
        yield (
            f"--sequence-parallel needs a --seq-length ({length}) that is a multiple of --tensor-model-parallel-size ({tensor}); "
            "change one"
        )
    if config.data_parallel.main_grads_dtype == "bf16" and not model.bf16:
        yield "--main-grads-dtype bf16 needs --bf16; give both, or leave it out"
    if config.optimizer.reuse_fp32_param and not model.bf16:
        wide = f"{'float64' if model.fp64 else 'float32'}, whose weights are the masters"
        given = "--fp16, whose weights are no half of a float32" if model.fp16 else wide
        yield f"--reuse-fp32-param needs --bf16, and this model is in {given}; leave it out"
    if model.distribute_saved_activations and (tensor == 1 or is_divided):
        parts, flag = "with --sequence-parallel, where they hold parts", "or use --tensor-model-parallel-size"
        instead = parts if tensor > 1 else flag
        yield f"--distribute-saved-activations shards copies that tensor-parallel ranks hold; leave it out {instead}"
    shortest = min((tokens for tokens in lengths.values() if tokens is not None), default=0)
    rows = shortest // config.parallel.context_parallel_size // (tensor if is_divided else 1)
    for flag, tiles in {"--tiled-mlp": model.tiled_mlp, "--tiled-loss": model.tiled_loss}.items():
        if shortest and tiles > max(rows, 1):
            yield f"{flag} {tiles} makes more tiles than a rank has tokens of a sample ({rows}); use at most {rows}"
    yield from _layer_problems(config)
    limit = model.max_position_embeddings
    for flag, tokens in lengths.items() if model.position_embedding_type != "relative" else ():
        if limit is not None and tokens is not None and limit < tokens:
            yield f"--max-position-embeddings ({limit}) must be at least {flag} ({tokens})"


def _optimizer_problems(config: Config, _: int) -> Iterator[str]:
    """An --optimizer of whole tensors, where a rank would have parts of them."""
    if not config.optimizer.rule().needs_full_matrix:
        return
    stage, offload = config.data_parallel.stage, config.offload
    away = offload.optimizer_offload_fraction > 0
    hindrances = {
        f"ZeRO stage {stage} (use --zero-stage 1)": stage > 1,
        "--optimizer-cpu-offload (leave it out)": away and offload.tier == "host",
        "--offload-dir (leave it out)": away and offload.tier == "file",
        "--reuse-fp32-param (leave it out)": config.optimizer.reuse_fp32_param,
    }
    for what in (what for what, given in hindrances.items() if given):
        yield f"--optimizer {config.optimizer.optimizer} updates whole matrices, and a rank has parts of them under {what}"


_MOST_ACTIONS = 1_000_000  # of a schedule; every rank holds all of it, about 300 MB with its transfers


def _layer_problems(config: Config) -> Iterator[str]:
    """Layers that cannot be divided between stages, or into the recompute and offload groups asked for."""
    try:
        largest = max(map(len, config.layer_split))
    except ValueError as error:
        if not is_user_error(error):
            raise
        yield from str(error).split("\n")
        return
    model = config.transformer
    offloaded = model.cpu_offloading_num_layers
    for name in ("recompute_num_layers", "cpu_offloading_num_layers"):
        if (getattr(model, name) or 0) > largest:
            most = f"it must be at most {largest}, the layers of the largest stage"
            yield f"{flag_of(name)} is {getattr(model, name)}; {most}"
    recomputed = (model.recompute_num_layers or 1) if model.recompute_method == "block" else largest
    if model.contiguous_checkpointing and offloaded >= recomputed:
        yield (
            f"--contiguous-checkpointing is left with nothing by --cpu-offloading-num-layers {offloaded}: every input that "
            "recomputed layers keep is offloaded; leave one of them out, or offload fewer layers"
        )


def _batch_problems(config: Config, world_size: int) -> list[str]:
    """Sizes of ranks, chunks and batch that do not divide; only the first problem, since the others would follow from it."""
    parallel, training = config.parallel, config.training
    stages = parallel.pipeline_model_parallel_size
    try:
        parallel.sizes(world_size, config.data_parallel.num_distributed_optimizer_instances)
    except ConfigError as error:
        return error.problems
    try:
        chunks = config.stages.chunks
    except ValueError as error:
        if not is_user_error(error):
            raise
        return []  # reported by `_layer_problems`
    if chunks > 1 and stages == 1:
        return [f"{chunks} chunks per rank ({config.schedule_name}): raise --pipeline-model-parallel-size to 2 or more"]
    tokens_unknown = training.step_batch_size_schedule is not None and config.data.seq_length is None
    if training.micro_batch_size is None or tokens_unknown:
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
    if actions > _MOST_ACTIONS:  # checked before the schedule is made
        return [
            f"--global-batch-size ({max(sizes)}) makes {most:,} microbatches per rank and step: a schedule of {actions:,} "
            f"forwards and backwards over all stages, above the limit of {_MOST_ACTIONS:,}; lower it, or raise "
            "--micro-batch-size or the number of data-parallel ranks"
        ]
    for size in sorted(set(sizes)):
        microbatches = size // config.samples_at_once(world_size)
        try:
            if size in (min(sizes), max(sizes)):  # two sizes are enough to show a wrong schedule
                make_schedule(config.schedule_name, stages, microbatches, chunks)
            else:
                SCHEDULES[config.schedule_name](stages, microbatches, chunks)
        except ValueError as error:
            if not is_user_error(error):
                raise
            where = f"steps of {size} samples: " if len(sizes) > 1 else ""
            return [where + problem for problem in str(error).split("\n")]
    return []


def _size_problem(config: Config, sizes: list[int], world_size: int) -> str | None:
    """The problem with the batch sizes of all steps, found before the run reaches them."""
    training, at_once = config.training, config.samples_at_once(world_size)
    ranks = config.data_parallel_size(world_size)
    product = f"{at_once} = --micro-batch-size ({training.micro_batch_size}) x data-parallel size ({ranks})"
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


def _unit_problems(config: Config, _: int) -> Iterator[str]:
    """Settings that count samples in a run of --train-iters, or iterations in a run of --train-samples."""
    training, rate = config.training, config.learning_rate
    if training.train_iters is not None and training.train_samples is not None:
        yield "--train-iters and --train-samples exclude each other; give one"
        return
    unit, other = ("iters", "samples") if training.train_iters is not None else ("samples", "iters")
    if training.train_iters is not None or training.train_samples is not None:
        for name in ("lr_decay", "lr_warmup", "lr_wsd_decay"):
            if getattr(rate, f"{name}_{other}"):
                flag = flag_of(name)
                yield f"{flag}-{other} needs --train-{other}; with --train-{unit} give {flag}-{unit}"
    for name in ("rampup_batch_size", "step_batch_size_schedule"):
        if training.train_iters is not None and getattr(training, name) is not None:
            yield f"{flag_of(name)} needs --train-samples instead of --train-iters"
    for name in ("global_batch_size", "rampup_batch_size", "decrease_batch_size_if_needed"):
        if training.step_batch_size_schedule is not None and getattr(training, name):
            yield f"--step-batch-size-schedule and {flag_of(name)} exclude each other; give one"
    if training.rampup_batch_size is not None and training.global_batch_size is None:
        yield "--rampup-batch-size needs --global-batch-size, the size it ends with"


def _schedule_problems(config: Config, _: int) -> list[str]:
    """An impossible learning rate schedule, whatever the batch size."""
    training = config.training
    length, unit = training.train_iters or training.train_samples, "iters" if training.train_iters else "samples"
    try:
        if length and config.learning_rate.lr is not None:
            learning_rate_schedule(config.learning_rate, RunLength(length, unit))
    except ConfigError as error:
        return error.problems
    return []
