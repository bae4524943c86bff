"""The rules between the components of a configuration: everything that is wrong, found before a process group exists."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from typing import Any

from megatron.core.config import ConfigError, flags_of, knobs
from megatron.core.optimizer.lr_schedule import RunLength, learning_rate_schedule
from megatron.core.parallel_config import grid_for
from megatron.core.pipeline_parallel.schedule import SCHEDULES, Schedule
from megatron.core.pipeline_parallel.simulate import make_schedule
from megatron.core.transformer.transformer_config import tensor_parallel_problems
from megatron.training.settings.config import COMPONENTS, CheckpointConfig, Config
from megatron.training.watch.watch_config import watch_problems


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
    problems += _load_problems(config.checkpoint)
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


def _load_problems(config: CheckpointConfig) -> list[str]:
    """Flags about a checkpoint, without one: a run that starts anew by mistake costs more than one that does not start."""
    if config.load is not None:
        return []
    problems = []
    if config.finetune and config.pretrained_checkpoint is None:
        problems.append(
            "--finetune needs weights to load: give --load DIR, or leave it out to start from initial weights"
        )
    if config.exit_on_missing_checkpoint:
        problems.append("--exit-on-missing-checkpoint needs --load, the folder whose checkpoint may be missing")
    return problems


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


def filled_in(parts: Mapping[str, Any]) -> Config:
    """These components, and defaults for the others: for the rules that can be checked although a component is missing."""
    return Config(**parts, **{name: component() for name, component in COMPONENTS.items() if name not in parts})


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
    problems = config.data.source_problems(needed=False)
    if config.fim.fim_data and config.data.mock_data:
        problems.append("--fim-data rearranges text, which --mock-data has none of; leave one of them out")
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
    if config.optimizer.reuse_fp32_param and not model.bf16:
        given = (
            "--fp16, whose weights are no half of a float32" if model.fp16 else "float32, whose weights are the masters"
        )
        problems.append(f"--reuse-fp32-param is for models of --bf16, and this one is of {given}; leave it out")
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
    model, problems = config.transformer, []
    for name, layers in (
        ("--recompute-num-layers", model.recompute_num_layers),
        ("--cpu-offloading-num-layers", model.cpu_offloading_num_layers),
    ):
        if layers is not None and layers > largest:
            problems.append(f"{name} is {layers}; it must be at most {largest}, the layers of the largest stage")
    recomputed = (model.recompute_num_layers or 1) if model.recompute_method == "block" else largest
    if model.contiguous_checkpointing and model.cpu_offloading_num_layers >= recomputed:
        problems.append(
            f"--contiguous-checkpointing is left with nothing by --cpu-offloading-num-layers {model.cpu_offloading_num_layers}: every "
            "input that recomputed layers keep is offloaded; leave one of them out, or offload fewer layers"
        )
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
        make = make_schedule if size == min(sizes) else _made_unseen  # one size shows what a schedule forgets
        try:
            make(config.schedule_name, stages, size // config.samples_at_once(world_size), chunks)
        except ValueError as error:
            where = f"steps of {size} samples: " if len(sizes) > 1 else ""
            return [where + problem for problem in str(error).split("\n")]
    return []


def _made_unseen(name: str, p: int, m: int, v: int) -> Schedule:
    return SCHEDULES[name](p, m, v)


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
