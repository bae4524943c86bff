"""A flag may be given that no code reads under the other settings: a note at the start names it, with the reason."""

from collections.abc import Iterator, Sequence
from typing import Any

from megatron.core.base.dataclass_flags import default_of, flags_of, option_fields
from megatron.core.optimizer.muon_config import MuonConfig
from megatron.core.pipeline_parallel.schedule.registry import has_groups

_ADAM = ("adam_beta1", "adam_beta2", "adam_eps")
_MUON = (*(field.name for field in option_fields(MuonConfig)), "muon_scalar_optimizer")
# The function of an optimizer -> the settings that it reads.
_READ_BY = {"AdamW": _ADAM, "Adam with L2": _ADAM, "SGD": ("sgd_momentum",), "Muon": _MUON}


def unread_flags(config: Any) -> dict[str, str]:
    """Return flag -> why it has no effect, for flags whose value is not the default. config: a `Config`."""
    rules = (
        *(_of_model, _of_experts, _of_pipeline, _of_optimizer, _of_learning_rate, _of_loss_scale, _of_exits, _of_data),
        *(_of_saving, _of_skipped_training, _of_validation, _of_outputs, _of_absent_flags),
    )
    reasons = {}
    for rule in rules:
        for part, names, reason in rule(config):
            for flag in _changed(part, names):
                reasons[flag] = reason
    return reasons


def without_effect_on_few_ranks(config: Any, world_size: int) -> dict[str, str]:
    """Return flag -> why it has no effect on this number of processes, for flags whose value is not the default."""
    reasons: dict[str, str] = {}
    data_parallel = config.data_parallel
    model_ranks = config.parallel.tensor_model_parallel_size * config.parallel.pipeline_model_parallel_size
    is_alone = world_size == model_ranks  # no other rank has gradients of the same parameters
    if is_alone and data_parallel.stage <= 1 and config.offload.tier == "device":  # else a shard may leave the device
        names = ["overlap_grad_reduce", "grad_reduce_in_bf16"]
        if data_parallel.stage == 1:
            names += [
                "overlap_param_gather",
                "use_distributed_optimizer",
                "zero_stage",
                "data_parallel_sharding_strategy",
            ]
        for flag in _changed(data_parallel, names):
            reasons[flag] = "one data-parallel rank has no other to share with"
    if world_size == 1:
        for flag in _changed(config.guard, ("check_weight_hash_across_dp_replicas_interval", "test_mode")):
            reasons[flag] = "one rank has no copies to compare"
    return reasons


Unread = tuple[Any, Sequence[str], str]  # a component, the settings that nothing reads, why


def _changed(part: Any, names: Sequence[str]) -> Iterator[str]:
    """Yield the flags of those settings that are not at their default."""
    fields = {field.name: field for field in option_fields(type(part))}
    for name in names:
        if getattr(part, name) != default_of(fields[name]):
            yield flags_of(fields[name])[0]


def _of_model(config: Any) -> Iterator[Unread]:
    model = config.transformer
    if model.position_embedding_type != "rope":
        why = "only --position-embedding-type rope rotates"
        yield model, ("rotary_base", "rotary_percent", "rope_scaling_factor"), why
    elif not model.ropes:
        of_rotation = (
            "rotary_base",
            "rotary_percent",
            "rotary_interleaved",
            "rotary_seq_len_interpolation_factor",
            "use_rope_scaling",
            "rope_scaling_factor",
            "rope_scaling",
            "rotary_base_of_windows",
        )
        yield model, of_rotation, f"no layer rotates with --no-rope-freq {model.no_rope_freq}"
    if model.window_attn_skip_freq and all(model.window_left(layer) is None for layer in range(model.num_layers)):
        yield (
            model,
            ("window_size",),
            f"no layer has a window with --window-attn-skip-freq {model.window_attn_skip_freq}",
        )
    if model.recompute_granularity is None:
        why = "nothing is recomputed without --recompute-granularity"
        yield model, ("recompute_method", "recompute_num_layers"), why
    if model.add_bias_linear:
        of_biases = ("add_qkv_bias", "add_attention_output_bias", "add_mlp_bias")
        yield model, of_biases, "every linear layer has a bias without --disable-bias-linear"
    if model.untie_embeddings_and_output_weights:
        yield model, ("scale_decoder_outputs",), "the output layer is not the word table"
    if not (model.bf16 or model.fp16):
        yield model, ("cpu_half_products",), "only --bf16 and --fp16 have half-precision products"
    if model.position_embedding_type == "none" or (model.position_embedding_type == "rope" and not model.ropes):
        yield config.data, ("reset_position_ids",), "no layer of the model reads positions"
    if model.init_method_xavier_uniform and model.softmax_type != "learnable":
        yield model, ("init_method_std",), "--init-method-xavier-uniform draws by the sizes of a matrix"
    if model.recompute_granularity == "full" and model.cpu_offloading_num_layers > 0:
        recomputed = model.recompute_num_layers or 1
        if model.recompute_method == "uniform" or recomputed >= model.cpu_offloading_num_layers:
            why = "every offloaded layer is recomputed, and its input is offloaded whatever its size"
            yield model, ("min_offloaded_tensor_size",), why


def _of_experts(config: Any) -> Iterator[Unread]:
    model = config.transformer
    for names, why in model.idle_settings_of_experts():
        yield model, names, why
    if not model.has_experts:
        why = "the model has no experts without --num-experts"
        yield config.parallel, ("expert_tensor_parallel_size",), why
    if all(model.is_moe_layer(layer) for layer in range(model.num_layers)):
        yield model, ("tiled_mlp",), "every layer has experts, and only a dense MLP has tiles"


def _of_pipeline(config: Any) -> Iterator[Unread]:
    parallel = config.parallel
    if parallel.pipeline_model_parallel_size == 1:
        of_stages = (
            "account_for_embedding_in_pipeline_split",
            "account_for_loss_in_pipeline_split",
            "scatter_gather_tensors_in_pipeline",
            "num_layers_per_virtual_pipeline_stage",
            "pipeline_model_parallel_layout",
            "use_tp_pp_dp_mapping",
        )
        yield parallel, of_stages, "there is one stage with --pipeline-model-parallel-size 1"
    elif parallel.tensor_model_parallel_size == 1:
        why = "each stage has one tensor-parallel rank, which sends all"
        yield parallel, ("scatter_gather_tensors_in_pipeline",), why
    if not has_groups(config.schedule_name):
        why = f"chunks do not take turns in groups with --pipeline-schedule {config.schedule_name}"
        yield parallel, ("microbatch_group_size_per_vp_stage",), why


def _of_optimizer(config: Any) -> Iterator[Unread]:
    """Yield the settings of our own optimizers; an optimizer of a script may read any of them."""
    if config.optimizer.weight_decay_incr_style != "constant":
        style = f"--weight-decay-incr-style {config.optimizer.weight_decay_incr_style}"
        yield config.optimizer, ("weight_decay",), f"{style} goes from --start-weight-decay to --end-weight-decay"
    read: set[str] = set()
    for function in config.optimizer.functions.values():
        if function not in _READ_BY:
            return
        read.update(_READ_BY[function])
    unread: list[str] = []
    for names in _READ_BY.values():
        for name in names:
            if name not in read and name not in unread:
                unread.append(name)
    yield config.optimizer, unread, f"--optimizer {config.optimizer.optimizer} does not read it"


def _of_learning_rate(config: Any) -> Iterator[Unread]:
    rate = config.learning_rate
    checkpoint = config.checkpoint
    if not (rate.lr_warmup_iters or rate.lr_warmup_samples or rate.lr_warmup_fraction):
        yield rate, ("lr_warmup_init", "lr_warmup_style"), "there is no warm-up"
    if rate.lr_decay_style != "WSD":
        yield rate, ("lr_wsd_decay_style",), "only --lr-decay-style WSD has it"
    if rate.lr_decay_style == "constant":
        of_decay = ["min_lr", "decoupled_min_lr"]
        if not rate.lr_warmup_fraction:  # a fraction of the decay
            of_decay += ["lr_decay_iters", "lr_decay_samples"]
        yield rate, of_decay, "--lr-decay-style constant does not decay"
    if checkpoint.load is None:
        why = "nothing is loaded without --load"
        if checkpoint.pretrained_checkpoint or checkpoint.hf_config:
            why = "weights alone are loaded without --load"
        yield rate, ("use_checkpoint_opt_param_scheduler", "override_opt_param_scheduler"), why


def _of_loss_scale(config: Any) -> Iterator[Unread]:
    scaling = config.loss_scaling
    dynamic = ("initial_loss_scale", "min_loss_scale", "loss_scale_window", "hysteresis")
    if scaling.loss_scale:
        yield scaling, dynamic, f"--loss-scale {scaling.loss_scale:g} is fixed"
    elif not config.transformer.fp16:
        yield scaling, dynamic, "the loss is scaled with --fp16 alone"


def _of_exits(config: Any) -> Iterator[Unread]:
    if not config.training.exit_signal_handler:
        yield (
            config.training,
            ("exit_signal",),
            "nothing waits for it without --exit-signal-handler: it ends the process",
        )


def _of_data(config: Any) -> Iterator[Unread]:
    if config.data.mock_data:
        of_files = ("data_cache_path", "mid_level_dataset_surplus", "mmap_bin_files", "epoch_stable_order")
        yield config.data, of_files, "made-up data have no files"
    if config.data.sft:
        why = "--sft reads examples, each a document of its own, in an order of its own"
        of_documents = ("epoch_stable_order", "mid_level_dataset_surplus", "mmap_bin_files", "eod_mask_loss")
        yield config.data, (*of_documents, "dataloader_inter_document_masking"), why
        yield config.fim, [field.name for field in option_fields(type(config.fim))], "--sft reorders no documents"


def _of_saving(config: Any) -> Iterator[Unread]:
    if config.checkpoint.save is None:
        yield config.checkpoint, ("save_interval", "save_optim", "save_frozen"), "nothing is saved without --save"


def _of_skipped_training(config: Any) -> Iterator[Unread]:
    if not config.training.skip_train:
        return
    why = "--skip-train trains nothing"
    of_saves = ("save", "save_interval", "async_save", "non_persistent_save_interval", "keep_checkpoints")
    of_steps = ("eval_interval", "exit_interval", "exit_duration_in_mins", "rampup_batch_size")
    of_checks = ("check_for_spiky_loss", "check_for_large_grads", "rerun_interval", "iterations_to_skip")
    yield config.checkpoint, (*of_saves, "save_retain_interval"), why
    yield config.training, of_steps, why
    yield config.guard, of_checks, why
    yield config.profile, ("profile",), why
    yield config.log, ("inspect", "log_straggler"), why


def _of_validation(config: Any) -> Iterator[Unread]:
    training = config.training
    if not training.eval_tasks:
        yield training, ("eval_tasks_limit",), "no tasks are evaluated without --eval-tasks"
    if not config.validates:
        why = "there is no validation with --eval-iters 0"
        yield training, ("eval_micro_batch_size", "eval_global_batch_size"), why
        if not training.eval_tasks:  # which are evaluated at the same steps
            yield training, ("eval_interval", "start_eval_at_iter"), why
    elif not training.eval_interval:
        yield training, ("start_eval_at_iter",), "with --eval-interval 0 validation comes after training"


def _of_absent_flags(config: Any) -> Iterator[Unread]:
    """Yield the settings that only say more about a flag, where that flag is not given."""
    log = config.log
    curves = config.tensorboard
    profile = config.profile
    if not curves.is_on:
        of_curves = ("tensorboard_log_interval", "log_learning_rate_to_tensorboard", "log_loss_scale_to_tensorboard")
        yield curves, of_curves, "there are no curves without --tensorboard-dir or --wandb-project"
    if curves.tensorboard_dir is None:
        yield curves, ("tensorboard_queue_size",), "there are no event files without --tensorboard-dir"
    if not profile.profile:
        of_trace = ("profile_step_start", "profile_step_end", "profile_ranks", "use_pytorch_profiler")
        yield profile, of_trace, "nothing is profiled without --profile"
    if not profile.record_memory_history:
        yield profile, ("memory_snapshot_path",), "there is no snapshot without --record-memory-history"
    if not log.log_straggler:
        yield log, ("straggler_minmax_count",), "no ranks are listed without --log-straggler"
    if log.timing_log_level == 0:
        of_timers = ("timing_log_option", "barrier_with_L1_time")
        yield log, of_timers, "there are no timers with --timing-log-level 0"
        why = "there are no timers with --timing-log-level 0; the time of an iteration is always among the curves"
        yield curves, ("log_timers_to_tensorboard",), why
    if config.guard.replay_every is None:
        why = "no microbatch is computed twice without --rerun-interval N, and only into those an error is injected"
        yield config.guard, ("error_injection_rate", "error_injection_type"), why
    elif config.guard.error_injection_rate == 0:
        yield config.guard, ("error_injection_type",), "nothing is injected with --error-injection-rate 0"


def _of_outputs(config: Any) -> Iterator[Unread]:
    """Yield requested numbers that have no output."""
    log = config.log
    curves = config.tensorboard
    if curves.is_on:
        return
    of_steps = ("log_batch_size_to_tensorboard", "log_memory_to_tensorboard", "log_world_size_to_tensorboard")
    yield curves, of_steps, "there are no curves without --tensorboard-dir or --wandb-project"
    if log.metrics_file is None:
        of_records = ("log_validation_ppl_to_tensorboard", "log_timers_to_tensorboard", "moe_per_layer_logging")
        yield curves, of_records, "nothing takes it without --tensorboard-dir, --wandb-project or --metrics-file"
