"""Which settings a run shares with the checkpoint that it goes on from: all of them, but for those listed here. Pure.

    NOT_COMPARED                 changes nothing that is computed, or is compared in another way
    PRECISION                    refused, unless --allow-precision-change
    the rest of the model        refused: the parameters would mean something else
    the rest                     said, and allowed

A setting that nothing here names is compared: one of the model refuses, any other is said. So is one that only the checkpoint has, or
only this code.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

from megatron.core.config import build, default_of, knobs
from megatron.core.datasets.data_config import DEFAULT_SPLIT
from megatron.core.tokenizers.tokenizer_config import TokenizerConfig
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.training.settings.config import COMPONENTS

Parts = Mapping[str, Mapping[str, Any]]  # component -> setting -> value, as `Config.as_json`

# Why they are not compared -> settings.
NOT_COMPARED: dict[str, tuple[str, ...]] = {
    "layout: any gives the numbers of one process": (
        "tensor_model_parallel_size",
        "pipeline_model_parallel_size",
        "sequence_parallel",
        "context_parallel_size",
        "expert_model_parallel_size",
        "num_layers_per_virtual_pipeline_stage",
        "num_virtual_stages_per_pipeline_rank",
        "pipeline_schedule",
        "decoder_first_pipeline_num_layers",
        "decoder_last_pipeline_num_layers",
        "account_for_embedding_in_pipeline_split",
        "account_for_loss_in_pipeline_split",
        "scatter_gather_tensors_in_pipeline",
        "use_tp_pp_dp_mapping",
        "overlap_grad_reduce",
        "ddp_bucket_size",
        "use_distributed_optimizer",
        "zero_stage",
        "data_parallel_sharding_strategy",
        "num_distributed_optimizer_instances",
        "outer_dp_sharding_strategy",
        "overlap_param_gather",
        "make_vocab_size_divisible_by",
    ),
    "the global batch size in force is compared": ("micro_batch_size", "global_batch_size"),
    "memory: what is kept, computed again or moved": (
        "recompute_granularity",
        "recompute_modules",
        "recompute_method",
        "recompute_num_layers",
        "distribute_saved_activations",
        "contiguous_checkpointing",
        "cpu_offloading_num_layers",
        "min_offloaded_tensor_size",
        "optimizer_cpu_offload",
        "optimizer_offload_fraction",
        "offload_dir",
        "offload_params",
        "empty_unused_memory_level",
        "poison_released_buffers",
    ),
    "device and processes": (
        "device",
        "distributed_backend",
        "distributed_timeout_minutes",
        "local_rank",
        "check_memory",
    ),
    "logs, curves and profiles": (
        "log_interval",
        "log_throughput",
        "log_params_norm",
        "log_num_zeros_in_grad",
        "log_progress",
        "metrics_file",
        "inspect",
        "log_memory_interval",
        "timing_log_level",
        "timing_log_option",
        "barrier_with_L1_time",
        "tensorboard_dir",
        "tensorboard_log_interval",
        "tensorboard_queue_size",
        "log_timers_to_tensorboard",
        "log_batch_size_to_tensorboard",
        "log_learning_rate_to_tensorboard",
        "log_loss_scale_to_tensorboard",
        "log_validation_ppl_to_tensorboard",
        "log_memory_to_tensorboard",
        "log_world_size_to_tensorboard",
        "wandb_project",
        "wandb_exp_name",
        "wandb_entity",
        "wandb_save_dir",
        "profile",
        "profile_step_start",
        "profile_step_end",
        "profile_ranks",
        "use_pytorch_profiler",
        "record_memory_history",
        "memory_snapshot_path",
    ),
    "where checkpoints are, and how this run starts and stops": (
        "save",
        "load",
        "save_interval",
        "save_optim",
        "pretrained_checkpoint",
        "finetune",
        "load_optim",
        "exit_on_missing_checkpoint",
        "allow_precision_change",
        "allow_tokenizer_change",
        "skip_train",
        "exit_interval",
        "exit_duration_in_mins",
        "exit_signal_handler",
    ),
    "compared as the schedules that follow from them": (
        "lr",
        "min_lr",
        "decoupled_lr",
        "decoupled_min_lr",
        "lr_decay_style",
        "lr_decay_iters",
        "lr_decay_samples",
        "lr_wsd_decay_style",
        "lr_wsd_decay_iters",
        "lr_wsd_decay_samples",
        "lr_warmup_iters",
        "lr_warmup_samples",
        "lr_warmup_fraction",
        "lr_warmup_init",
        "override_opt_param_scheduler",
        "use_checkpoint_opt_param_scheduler",
        "weight_decay",
        "start_weight_decay",
        "end_weight_decay",
        "weight_decay_incr_style",
    ),
    "compared as the rows of the position table": ("max_position_embeddings",),
    "how samples are read, not which": ("data_cache_path", "mmap_bin_files", "num_workers"),
}
PRECISION = ("bf16", "fp16", "fp64", "fp32_residual_connection")
# Of the model's settings those that change its course, and not what its parameters mean.
COURSE_OF_MODEL = (
    "hidden_dropout",
    "attention_dropout",
    "init_method_std",
    "attention_backend",
    "label_smoothing",
    "z_loss_coeff",
    "cpu_half_products",
)
# Compared by what the files hold, where both sides say that.
BY_TOKENIZER = tuple(f.name for f in knobs(TokenizerConfig))
BY_DATA = (
    "data_path",
    "train_data_path",
    "valid_data_path",
    "test_data_path",
    "data_args_path",
    "per_split_data_args_path",
)


class Change(NamedTuple):
    """One setting of two values. is_unknown: only the checkpoint has it."""

    name: str
    before: Any
    now: Any
    is_unknown: bool = False


@dataclass
class Changes:
    model: list[Change] = field(default_factory=list)
    precision: list[Change] = field(default_factory=list)
    course: list[Change] = field(default_factory=list)


def compare(
    mine: Parts, saved: Parts, own_defaults: Mapping[str, Any] = MappingProxyType({}), skipped: Collection[str] = ()
) -> Changes:
    """What differs between the settings of a run and those of a checkpoint, without those in `skipped`.

    own_defaults: of the script's own flags. A checkpoint older than a setting has its default; one that is older than the saving of
    a script's own flags says nothing of them.
    """
    changes, leave_out = Changes(), {*skipped, *(name for names in NOT_COMPARED.values() for name in names)}
    own_of_model = {*mine.get("own_model", ()), *saved.get("own_model", ())}
    now_of, before_of = _in_force(mine), _in_force(saved)
    if "own" not in before_of:
        now_of.pop("own", None)
    for part in dict.fromkeys([*now_of, *before_of]):
        now, before = now_of.get(part, {}), before_of.get(part, {})
        defaults = {f.name: default_of(f) for f in knobs(COMPONENTS[part])} if part in COMPONENTS else own_defaults
        for name in dict.fromkeys([*now, *before]):
            change = Change(name, before.get(name, defaults.get(name)), now.get(name), name not in now)
            if name in leave_out or (change.before == change.now and not change.is_unknown):
                continue
            of_model = name in own_of_model if part == "own" else part == "transformer" and name not in COURSE_OF_MODEL
            found = changes.precision if name in PRECISION else changes.model if of_model else changes.course
            found.append(change)
    return changes


OF_WIDTHS = ("hidden_size", "num_attention_heads", "ffn_hidden_size", "kv_channels", "swiglu")


def _in_force(parts: Parts) -> dict[str, dict[str, Any]]:
    """The settings with what those that are unset stand for, and the script's own in one part."""
    found = {part: dict(settings) for part, settings in parts.items()}
    if "transformer" in found:
        model = found["transformer"]
        config = build(TransformerConfig, {name: model[name] for name in OF_WIDTHS if name in model})
        model |= {"ffn_hidden_size": config.ffn_size, "kv_channels": config.head_width}
    if "data" in found:
        found["data"]["split"] = found["data"].get("split") or DEFAULT_SPLIT
    if "own_model" in found:
        found["own"] = {**found.get("own", {}), **found.pop("own_model")}
    return found


def precision_of(model: Mapping[str, Any]) -> str:
    """What a model is trained in, by its settings."""
    name = next((name for name in ("bf16", "fp16", "fp64") if model.get(name)), "fp32")
    return name + (" with its residual stream in fp32" if model.get("fp32_residual_connection") else "")
