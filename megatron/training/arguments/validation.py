"""The rules between the components of a configuration. All problems are found before a process group exists."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from typing import Any

from megatron.core.base.dataclass_flags import ConfigError, flag_of, flags_of, option_fields
from megatron.core.base.user_error_and_torchrun_error_file import is_user_error
from megatron.core.dist_checkpointing.manifest_format import iteration_of
from megatron.core.optimizer.lr_wd_schedule_by_samples import RunLength, learning_rate_schedule
from megatron.core.pipeline_parallel.schedule.registry import unchecked_step
from megatron.core.pipeline_parallel.schedule.simulate import make_schedule
from megatron.core.storage.path_or_url import is_direct_parent, is_url, path_of, same_folder
from megatron.core.transformer.context_parallel_setting_problems import context_parallel_problems
from megatron.core.transformer.model_config import expert_parallel_problems, tensor_parallel_problems
from megatron.training.arguments.choose_checkpoint_to_resume import latest_iteration_in
from megatron.training.arguments.config import COMPONENTS, CheckpointConfig, Config
from megatron.training.arguments.monitor_config import watch_problems


def check(config: Config, world_size: int) -> None:
    """Raise ConfigError with all violated rules at once. Every rank calls it, before anything communicates."""
    rules = (
        _missing,
        _data_problems,
        _model_problems,
        _optimizer_problems,
        _batch_problems,
        _expert_problems,
        _unit_problems,
        _schedule_problems,
        _checkpoint_problems,
        _url_problems,
        _guard_problems,
        _watch_problems,
    )
    problems = [problem for rule in rules for problem in rule(config, world_size)]
    if problems:
        raise ConfigError(problems)


def _checkpoint_problems(config: Config, _: int) -> Iterator[str]:
    """Yield flags about checkpoints that need another flag.

    A run that starts anew by mistake costs more than a refused run.
    """
    checkpoint = config.checkpoint
    stage = config.data_parallel.stage

    # saving
    for name in ("keep_checkpoints", "save_retain_interval"):
        if checkpoint.save is None and getattr(checkpoint, name) is not None:
            yield f"{flag_of(name)} needs --save, the folder to write to"
    for name in ("use_checkpoint_args", "use_mp_args_from_checkpoint_args"):
        if getattr(checkpoint, name) and checkpoint.load is None and checkpoint.pretrained_checkpoint is None:
            yield f"{flag_of(name)} needs --load, the folder whose settings it uses"
    if checkpoint.async_save and checkpoint.save is None:
        yield "--async-save needs --save, the folder to write to; give both, or leave out --async-save"

    # loading
    if checkpoint.load is None and checkpoint.ckpt_step is not None:
        yield "--ckpt-step needs --load, the folder with that iteration"
    if checkpoint.load is None and checkpoint.finetune and checkpoint.pretrained_checkpoint is None:
        yield "--finetune needs weights to load; give --load DIR, or leave --finetune out to start from initial weights"
    if checkpoint.finetune and config.learning_rate.use_checkpoint_opt_param_scheduler:
        yield (
            "--use-checkpoint-opt_param-scheduler resumes the schedules of the checkpoint's run, but --finetune "
            "loads only its weights and starts at iteration 0; leave one of them out"
        )
    if checkpoint.load is None and checkpoint.exit_on_missing_checkpoint:
        yield "--exit-on-missing-checkpoint needs --load, the folder to resume from"
    if checkpoint.load is None and config.training.skip_train and not config.validates:
        yield (
            "--skip-train with --eval-iters 0 neither trains nor validates; raise --eval-iters to validate (with "
            "--load DIR), or leave out --skip-train to train"
        )

    # folders of --save-hf
    if config.hf.save_hf is not None and config.training.skip_train:
        yield "--save-hf writes a trained model, but --skip-train trains nothing; leave one of them out"
    for name in ("save", "load", "pretrained_checkpoint"):
        folder = getattr(checkpoint, name)
        hf = config.hf.save_hf
        if folder and hf and same_folder(folder, hf):
            yield f"--save-hf is also the folder of {flag_of(name)}, {folder}; give --save-hf a folder of its own"
        elif folder and hf and name != "save" and is_direct_parent(hf, folder):
            yield (
                f"{flag_of(name)} {folder} is one of the folders of --save-hf {hf}, and this run would overwrite it "
                "when it reaches that iteration; give --save-hf another folder"
            )
    save = checkpoint.save
    hf = config.hf.save_hf
    if save and hf and iteration_of(path_of(hf).name) is not None and is_direct_parent(save, hf):
        yield (
            f"--save-hf {hf} has the name of a checkpoint folder in --save {save}; give another folder, such as "
            f"{save}/hf"
        )

    # offload
    if config.offload.offload_params and stage < 3:
        yield (
            f"--offload-params offloads parameter shards, but ZeRO stage {stage} does not shard parameters; give "
            "--zero-stage 3, or leave out --offload-params"
        )


def _url_problems(config: Config, _: int) -> Iterator[str]:
    """Yield URLs of object stores that this installation cannot read.

    Yield also URLs where a folder of this machine is needed.
    """
    save = config.checkpoint.save
    for component in fields(config):
        part = getattr(config, component.name)
        for field in option_fields(type(part)):
            if field.metadata.get("metavar") != "DIR":
                continue
            folder = getattr(part, field.name)
            if folder is None or not is_url(folder):
                continue
            flag = flags_of(field)[0]
            if field.name not in ("save", "load", "pretrained_checkpoint"):
                yield f"{flag} {folder} is a URL, but must be a folder of this machine; give one"
                continue
            try:
                path_of(folder)
            except ConfigError as error:
                yield f"{flag} {error}"
    if save is None or not is_url(save):
        return
    if config.log.log_progress:
        yield (
            f"--log-progress appends to a file in --save, but --save {save} is an object store, which only "
            "writes complete objects; leave out --log-progress"
        )
    if config.profile.profile and config.tensorboard.tensorboard_dir is None:
        yield f"--profile needs a local folder for its trace, but --save {save} is a URL; give --tensorboard-dir"


def _guard_problems(config: Config, _: int) -> Iterator[str]:
    guard = config.guard
    training = config.training
    if guard.iterations_to_skip and config.data.dataloader_type == "external":
        yield (
            "--iterations-to-skip skips samples by their number, but samples of --dataloader-type external have no "
            "numbers; leave one of them out"
        )
    folders = {"--save": config.checkpoint.save, "--load": config.checkpoint.load}
    for flag, folder in folders.items():
        if folder and guard.bad_step_dir and same_folder(folder, guard.bad_step_dir):
            yield (
                f"--bad-step-dir is also the folder of {flag}; there a saved bad step, which has no optimizer "
                "state, would become the latest checkpoint; give another folder"
            )
    if guard.nan_action != "stop" and not training.check_for_nan_in_loss_and_grad:
        yield (
            "--nan-action skip needs the check for NaN, which --no-check-for-nan-in-loss-and-grad switches off; "
            "leave one of them out"
        )
    if guard.spike_action != "report" and not (guard.check_for_spiky_loss or guard.check_for_large_grads):
        yield (
            f"--spike-action {guard.spike_action} needs a check; give --check-for-spiky-loss or --check-for-large-grads"
        )


def _watch_problems(config: Config, world_size: int) -> Iterator[str]:
    return watch_problems(
        config.log, config.tensorboard, config.profile, save=config.checkpoint.save, world_size=world_size
    )


def _missing(config: Config, _: int) -> Iterator[str]:
    """Yield required settings that are not given. A run that trains nothing needs neither a rate nor a length."""
    trains = not config.training.skip_train
    for component in fields(config):
        part = getattr(config, component.name)
        for field in option_fields(type(part)):
            is_needed = field.metadata["required"] and (trains or field.name != "lr")
            if is_needed and getattr(part, field.name) is None:
                yield f"{flags_of(field)[0]} is required"
    if trains and config.training.train_iters is None and config.training.train_samples is None:
        yield "--train-iters (or --train-samples) is required"
    if config.data.seq_length is None and config.tokenizer.tokenizer_type is None:
        yield from _checkpoint_has_them(config.checkpoint)


def _checkpoint_has_them(checkpoint: CheckpointConfig) -> Iterator[str]:
    """Yield the flag that takes settings from the checkpoint that the run would load, if there is one."""
    if checkpoint.use_checkpoint_args:
        return
    for root in (checkpoint.load, checkpoint.pretrained_checkpoint):
        if root is not None and not is_url(root) and latest_iteration_in(root) is not None:
            yield (
                f"the checkpoint in {root} has a model, a tokenizer and a --seq-length; --use-checkpoint-args takes them "
                "from there"
            )
            return


def flags_in(problems: Iterable[str]) -> set[str]:
    """Return the flags named in messages."""
    return {flag for problem in problems for flag in re.findall(r"--[\w-]*\w", problem)}


def with_default_components(parts: Mapping[str, Any]) -> Config:
    """Return a config of these components and defaults for the others.

    With it rules are checked although a component is invalid.
    """
    defaults = {name: component() for name, component in COMPONENTS.items() if name not in parts}
    return Config(**parts, **defaults)


def drop_doubtful_problems(known: Sequence[str], parts: Mapping[str, Any], found: Sequence[str]) -> list[str]:
    """Return the problems in `found` that are real.

    Others come of the defaults that `with_default_components` used for components missing in `parts`.

    A problem is dropped if it names a flag of a missing component, or of the problems `known`.
    """
    # flags and words whose values are not known
    doubtful_flags = flags_in(known)
    for name, component in COMPONENTS.items():
        if name not in parts:
            for field in option_fields(component):
                doubtful_flags.update(flags_of(field))
    doubtful_words = ()
    if "parallel" not in parts:
        doubtful_words = ("world size", "data-parallel size")

    real = []
    for problem in found:
        if flags_in([problem]) & doubtful_flags:
            continue
        if any(words in problem for words in doubtful_words):
            continue
        real.append(problem)
    return real


def _data_problems(config: Config, _: int) -> Iterator[str]:
    data = config.data
    source_problems = data.source_problems(needed=False, trains=not config.training.skip_train)
    yield from source_problems or data.validation_problems()
    if data.full_validation and data.mock_data and config.training.eval_iters == 0:
        yield (
            "--full-validation with --mock-data, which has no end, reads --eval-iters batches, but --eval-iters is "
            "0; raise --eval-iters"
        )
    if config.fim.fim_data and data.dataloader_inter_document_masking:
        yield (
            "--dataloader-inter-document-masking goes by the lengths of documents, which --fim-data changes; use "
            "--reset-attention-mask and --reset-position-ids, which look for the token that ends a document"
        )
    if config.fim.fim_data and config.data.mock_data:
        yield "--fim-data reorders text, but --mock-data has no text; leave one of them out"


def _model_problems(config: Config, _: int) -> Iterator[str]:
    model = config.transformer
    tp = config.parallel.tensor_model_parallel_size
    sequence_parallel = config.parallel.sequence_parallel_on
    length = config.data.seq_length
    lengths = {"--seq-length": length, "--decoder-seq-length": config.data.decoder_seq_length}

    # sizes that do not divide
    yield from tensor_parallel_problems(model, tp)
    yield from context_parallel_problems(config.parallel, model, lengths)
    if sequence_parallel and (length or 0) % tp:
        yield (
            f"--sequence-parallel needs a --seq-length ({length}) that is a multiple of --tensor-model-parallel-size ({tp}); "
            "change one"
        )

    # precision
    if config.data_parallel.main_grads_dtype == "bf16" and not model.bf16:
        yield "--main-grads-dtype bf16 needs --bf16; give both, or leave out --main-grads-dtype"
    if config.optimizer.reuse_fp32_param and not model.bf16:
        if model.fp16:
            precision = "--fp16, whose weights are not the upper half of a float32"
        else:
            precision = f"{'float64' if model.fp64 else 'float32'}, whose weights are the masters"
        yield f"--reuse-fp32-param needs --bf16, but this run uses {precision}; leave it out"

    # activations
    if model.distribute_saved_activations and (tp == 1 or sequence_parallel):
        instead = "or use --tensor-model-parallel-size"
        if tp > 1:
            instead = "with --sequence-parallel, which shards them already"
        yield (
            "--distribute-saved-activations has no effect here: it shards saved activations of which each "
            f"tensor-parallel rank would store a full copy; leave it out {instead}"
        )

    # tiles: not more than the tokens of a sample on a rank
    shortest = min((tokens for tokens in lengths.values() if tokens is not None), default=0)
    rank_tokens = shortest // config.parallel.context_parallel_size // (tp if sequence_parallel else 1)
    for flag, tiles in {"--tiled-mlp": model.tiled_mlp, "--tiled-loss": model.tiled_loss}.items():
        if 0 < rank_tokens < tiles:  # ranks without tokens are refused elsewhere
            yield (
                f"{flag} {tiles} is more than the tokens of a sample on a rank ({rank_tokens}); give at most "
                f"{rank_tokens}"
            )

    # layers
    yield from _layer_problems(config)

    # positions
    limit = model.max_position_embeddings
    if limit is not None and model.position_embedding_type != "relative":
        for flag, tokens in lengths.items():
            if tokens is not None and limit < tokens:
                yield (
                    f"--max-position-embeddings ({limit}) must be at least {flag} ({tokens}); lower {flag}, or raise the limit "
                    "(of a published model: docs/models.md, a longer context)"
                )


def _optimizer_problems(config: Config, _: int) -> Iterator[str]:
    """Yield settings that leave a rank parts of tensors, for an --optimizer that updates whole tensors."""
    if not config.optimizer.rule().needs_full_matrix:
        return
    stage = config.data_parallel.stage
    offload = config.offload
    offloads_state = offload.optimizer_offload_fraction > 0
    reasons = []
    if stage > 1:
        reasons.append(f"ZeRO stage {stage} (use --zero-stage 1)")
    if offloads_state and offload.tier == "host":
        reasons.append("--optimizer-cpu-offload (leave it out)")
    if offloads_state and offload.tier == "file":
        reasons.append("--offload-dir (leave it out)")
    if config.optimizer.reuse_fp32_param:
        reasons.append("--reuse-fp32-param (leave it out)")
    for reason in reasons:
        yield (
            f"--optimizer {config.optimizer.optimizer} updates complete matrices, but a rank has only parts of "
            f"them with {reason}"
        )


_MOST_ACTIONS = 1_000_000  # of a schedule; every rank holds all of it, about 300 MB with its transfers


def _layer_problems(config: Config) -> Iterator[str]:
    """Yield problems of layers that cannot be divided as requested.

    That is between stages, or into the groups of recompute and offload.
    """
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
    recomputed = largest
    if model.recompute_method == "block":
        recomputed = model.recompute_num_layers or 1
    if model.contiguous_checkpointing and offloaded >= recomputed:
        yield (
            f"--contiguous-checkpointing has no inputs to store: --cpu-offloading-num-layers {offloaded} offloads "
            "the inputs of all recomputed layers; leave one of them out, or offload fewer layers"
        )


def _expert_problems(config: Config, _: int) -> Iterator[str]:
    """Yield what cannot be done with experts that are sharded over other ranks than the other layers."""
    parallel = config.parallel
    size = parallel.expert_model_parallel_size
    sharded = parallel.expert_tensor_parallel_size or parallel.tensor_model_parallel_size
    model = config.transformer
    tp = parallel.tensor_model_parallel_size
    if model.has_experts:
        yield from expert_parallel_problems(model, size, sharded)
        shared = model.moe_shared_expert_intermediate_size or 0
        if shared % tp:
            yield (
                f"--moe-shared-expert-intermediate-size ({shared}) must be a multiple of --tensor-model-parallel-size ({tp}); "
                "change one"
            )
        rows = (config.data.seq_length or 0) // parallel.context_parallel_size
        if rows % tp and not parallel.sequence_parallel_on:
            yield (
                f"--num-experts: tensor-parallel ranks divide the {rows} tokens of a sample among them before they are sent to "
                f"experts, so --seq-length must be a multiple of --tensor-model-parallel-size ({tp}) x "
                f"--context-parallel-size ({parallel.context_parallel_size}); change one"
            )
    if config.data_parallel.fixed_order_grad_reduce and (size, sharded) != (1, parallel.tensor_model_parallel_size):
        yield (
            f"--fixed-order-grad-reduce is not built for experts on other ranks than the other layers "
            f"(--expert-model-parallel-size {size}, --expert-tensor-parallel-size {sharded}); leave it out"
        )


def _batch_problems(config: Config, world_size: int) -> list[str]:
    """Return the sizes of ranks, chunks and batch that do not divide.

    It is the first problem alone, since the others would follow from it.
    """
    parallel = config.parallel
    training = config.training
    stages = parallel.pipeline_model_parallel_size

    # ranks and chunks
    try:
        parallel.sizes(world_size, config.data_parallel.num_distributed_optimizer_instances).expert()
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

    # batch sizes
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

    # the schedule; its size is checked before it is built
    most_microbatches = max(sizes) // config.samples_at_once(world_size)
    actions = 2 * most_microbatches * stages * chunks
    if actions > _MOST_ACTIONS:
        return [
            f"--global-batch-size ({max(sizes)}) makes {most_microbatches:,} microbatches per rank and step: a schedule of "
            f"{actions:,} forwards and backwards over all stages, above the limit of {_MOST_ACTIONS:,}; lower it, or raise "
            "--micro-batch-size or the number of data-parallel ranks"
        ]
    group = parallel.microbatch_group_size_per_vp_stage
    for size in sorted(set(sizes)):
        microbatches = size // config.samples_at_once(world_size)
        try:
            if size in (min(sizes), max(sizes)):  # two sizes are enough to show a wrong schedule
                make_schedule(config.schedule_name, stages, microbatches, chunks, group)
            else:
                unchecked_step(config.schedule_name, stages, microbatches, chunks, group)
        except ValueError as error:
            if not is_user_error(error):
                raise
            where = f"steps of {size} samples: " if len(sizes) > 1 else ""
            return [where + problem for problem in str(error).split("\n")]
    return []


def _size_problem(config: Config, sizes: list[int], world_size: int) -> str | None:
    """Return the problem with the batch sizes of all steps and of validation, found before the run reaches them."""
    training = config.training
    at_once = config.samples_at_once(world_size)
    ranks = config.data_parallel_size(world_size)
    product = f"{at_once} = --micro-batch-size ({training.micro_batch_size}) x data-parallel size ({ranks})"
    eval_at_once = config.eval_samples_at_once(world_size)
    eval_size = training.eval_global_batch_size or sizes[-1]
    if config.validates and training.eval_micro_batch_size is not None and eval_size % eval_at_once:
        flag = "--global-batch-size" if training.eval_global_batch_size is None else "--eval-global-batch-size"
        return (
            f"{flag} ({eval_size}) must be a multiple of {eval_at_once} = --eval-micro-batch-size "
            f"({training.eval_micro_batch_size}) x data-parallel size ({ranks}), since validation takes as many samples at "
            "once; change one, or give --eval-global-batch-size"
        )
    if training.eval_global_batch_size is not None and training.eval_global_batch_size % eval_at_once:
        return f"--eval-global-batch-size ({training.eval_global_batch_size}) must be a multiple of {product}"
    if training.decrease_batch_size_if_needed:
        if all(sizes):
            return None
        return f"steps must have at least {product} samples; raise the smallest step size"
    uneven = [str(size) for size in sizes if size % at_once]
    if not uneven:
        return None
    if len(sizes) == 1:
        return f"--global-batch-size ({training.global_batch_size}) must be a multiple of {product}"
    flag = "--rampup-batch-size" if training.rampup_batch_size else "--step-batch-size-schedule"
    listed = ", ".join(uneven[:5])
    if len(uneven) > 5:
        listed += f" and {len(uneven) - 5} more sizes"
    problem = f"{flag} makes steps of {listed} samples, which must be multiples of {product}; change one"
    if training.rampup_batch_size:
        problem += " or give --decrease-batch-size-if-needed"
    return problem


def _unit_problems(config: Config, _: int) -> Iterator[str]:
    """Yield settings that count samples in a run of --train-iters, or iterations in a run of --train-samples."""
    training = config.training
    rate = config.learning_rate
    if training.train_iters is not None and training.train_samples is not None:
        yield "--train-iters and --train-samples exclude each other; give only one of them"
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
            yield f"--step-batch-size-schedule and {flag_of(name)} exclude each other; give only one of them"
    if training.rampup_batch_size is not None and training.global_batch_size is None:
        yield "--rampup-batch-size needs --global-batch-size, the batch size at its end"


def _schedule_problems(config: Config, _: int) -> list[str]:
    """Return the problems of a learning rate schedule that is impossible with any batch size."""
    training = config.training
    length = training.train_iters or training.train_samples
    unit = "iters" if training.train_iters else "samples"
    try:
        if length and config.learning_rate.lr is not None:
            learning_rate_schedule(config.learning_rate, RunLength(length, unit))
    except ConfigError as error:
        return error.problems
    return []
