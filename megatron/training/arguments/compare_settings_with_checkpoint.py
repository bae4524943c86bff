"""A run's settings are compared with those of the checkpoint that it resumes from. Pure.

    NOT_COMPARED (and _PARTS)    no effect on the numbers, or compared in another way
    PRECISION                    refused without --allow-precision-change
    ROPE                         refused without --allow-rope-change
    BEGINS_AT_ZEROS              reported and allowed if turned on, refused if turned off
    other model settings         refused: the parameters would mean something else
    all other settings           reported and allowed

A setting not named here is compared, also if only the checkpoint or only this code has it.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

from megatron.core.base.dataclass_flags import build, default_of, option_fields
from megatron.core.datasets.data_config import DEFAULT_SPLIT
from megatron.core.tokenizers.tokenizer_config_and_build import TokenizerConfig
from megatron.core.transformer.model_config import (
    OF_EXPERTS,
    ModelConfig,
    canonical_expert_settings,
    canonical_layer_pattern,
)
from megatron.training.arguments.config import COMPONENTS

Parts = Mapping[str, Mapping[str, Any]]  # component -> setting -> value, as `Config.as_json`

# Components that are not compared, and why; then single settings of the other components, by reason.
NOT_COMPARED_PARTS = {
    "parallel": "layout: every layout gives the numbers of one process",
    "offload": "memory: which state is offloaded",
    "device": "device and processes",
    "hangs": "how a rank that hangs is found",
    "log": "logs",
    "tensorboard": "curves",
    "profile": "profiles",
    "checkpoint": "checkpoint folders",
    "hf": "folders of the model in another form",
    "learning_rate": "compared as a schedule",
}
NOT_COMPARED = {
    "layout: every layout gives the numbers of one process": (
        *(
            "overlap_grad_reduce",
            "overlap_param_gather",
            "ddp_bucket_size",
            "make_vocab_size_divisible_by",
            "pad_vocab_size",
        ),
        *("use_distributed_optimizer", "zero_stage", "data_parallel_sharding_strategy"),
        *("use_megatron_fsdp", "use_torch_fsdp2"),
        *("num_distributed_optimizer_instances", "outer_dp_sharding_strategy"),
    ),
    "the global batch size in force is compared": ("micro_batch_size", "global_batch_size"),
    "memory: activations that are saved, recomputed or offloaded": (
        *("recompute_granularity", "recompute_modules", "recompute_method", "recompute_num_layers"),
        "moe_layer_recompute",
        *("distribute_saved_activations", "contiguous_checkpointing", "poison_released_buffers"),
        *("cpu_offloading_num_layers", "min_offloaded_tensor_size"),
    ),
    "how this run starts and stops": (
        "skip_train",
        "exit_interval",
        "exit_duration_in_mins",
        "exit_signal_handler",
        "exit_signal",
    ),
    "compared as a schedule": (*("weight_decay", "start_weight_decay", "end_weight_decay", "weight_decay_incr_style"),),
    "compared as the rows of the position table": ("max_position_embeddings",),
    "what is looked at beside the run": (
        "test_mode",
        *("check_weight_hash_across_dp_replicas_interval", "check_state_hash_interval", "rerun_mode", "bad_step_dir"),
        *("rerun_interval", "error_injection_rate", "error_injection_type"),
        *("eval_global_batch_size", "eval_micro_batch_size", "start_eval_at_iter"),
        *("full_validation", "multiple_validation_sets", "validation_set_names"),
    ),
    "how samples are read, not which": ("data_cache_path", "mmap_bin_files", "num_workers"),
}
PRECISION = ("bf16", "fp16", "fp64", "fp32_residual_connection")
# How queries and keys are rotated, which a longer context changes: no parameter has another shape or place.
SCALING = ("rotary_seq_len_interpolation_factor", "use_rope_scaling", "rope_scaling_factor", "rope_scaling")
ROPE = ("rotary_base", "rotary_base_of_windows", *SCALING)
# Model settings that change the course of training, but not the meaning of parameters.
COURSE_OF_MODEL = (
    *(
        "hidden_dropout",
        "attention_dropout",
        "init_method_std",
        "init_method_xavier_uniform",
        "embedding_init_method_std",
        "label_smoothing",
        "z_loss_coeff",
    ),
    *("attention_backend", "cpu_half_products", "compile", "tiled_mlp", "tiled_loss"),
    # of experts: losses, draws, capacity, precision and dispatch
    *("moe_router_load_balancing_type", "moe_aux_loss_coeff", "moe_z_loss_coeff", "moe_input_jitter_eps"),
    *("moe_router_bias_update_rate", "moe_router_force_load_balancing", "moe_enable_routing_replay"),
    *("moe_expert_capacity_factor", "moe_token_drop_policy", "moe_pad_expert_input_to_capacity", "moe_router_dtype"),
    *("moe_token_dispatcher_type", "moe_grouped_gemm", "moe_shared_expert_overlap"),
)


class Begins(NamedTuple):
    """What a model setting adds to a checkpoint.

    name: the end of its name. why: the reason why a model in which it is turned off is another.
    """

    name: str
    why: str
    is_parameter: bool = False  # else a buffer


# What begins at zeros, so that a model in which the setting is turned on computes what it computed.
BEGINS_AT_ZEROS = {
    "moe_router_enable_expert_bias": Begins(
        "mlp.router.expert_bias",
        "tokens would visit other experts without the bias that has balanced them; it can be turned on, not off",
    ),
    "moe_router_bias": Begins(
        "mlp.router.bias",
        "the router would choose and weigh experts without the bias that it has learned",
        is_parameter=True,
    ),
}
# Compared by the files' content, if both sides have its hash.
BY_TOKENIZER = tuple(f.name for f in option_fields(TokenizerConfig))
BY_DATA = (
    *("data_path", "train_data_path", "valid_data_path", "test_data_path"),
    *("data_args_path", "per_split_data_args_path"),
)


class Change(NamedTuple):
    """A setting whose value has changed.

    is_unknown: only the checkpoint has it. is_new: a flag of the script's own that only this run has; `before` is its
    default.
    """

    name: str
    before: Any
    now: Any
    is_unknown: bool = False
    is_new: bool = False


def advice_of_conversion(change: Change, folder: str) -> str:
    """Return how a tool makes, of the checkpoint in `folder`, one with this run's setting; "" if none does."""
    if change.name != "num_experts" or change.before is not None:
        return ""
    return (
        f"; leave the flag out, or load what tools/checkpoint_convert.py --load {folder} --save NEW --num-experts {change.now} "
        "makes (Megatron's --moe-use-upcycling)"
    )


@dataclass
class Changes:
    model: list[Change] = field(default_factory=list)
    precision: list[Change] = field(default_factory=list)
    rope: list[Change] = field(default_factory=list)
    course: list[Change] = field(default_factory=list)
    turned_on: list[Change] = field(default_factory=list)  # of BEGINS_AT_ZEROS


def compare(
    mine: Parts, saved: Parts, own_defaults: Mapping[str, Any] = MappingProxyType({}), skipped: Collection[str] = ()
) -> Changes:
    """Return the settings that differ between a run (`mine`) and a checkpoint (`saved`), except those in `skipped`.

    own_defaults: defaults of the script's own flags. A setting that the checkpoint lacks counts as its default; the
    script's own flags are not compared with a checkpoint that has none.
    """
    changes = Changes()
    ignored = set(skipped)
    for names in NOT_COMPARED.values():
        ignored.update(names)
    own_of_model = {*mine.get("own_model", ()), *saved.get("own_model", ())}
    run_parts = _in_force(mine)
    checkpoint_parts = _in_force(saved)
    if "own" not in checkpoint_parts:
        run_parts.pop("own", None)
    # if one of two models has experts, that says all: what its experts are is no difference of its own
    has_experts = [
        parts.get("transformer", {}).get("num_experts") is not None for parts in (run_parts, checkpoint_parts)
    ]
    if has_experts[0] != has_experts[1]:
        ignored.update(OF_EXPERTS)
        ignored.remove("num_experts")
    # where one of them has no dense layer, its experts or --moe-layer-freq say so
    is_without_dense = [
        parts.get("transformer", {}).get("ffn_hidden_size") is None for parts in (run_parts, checkpoint_parts)
    ]
    if is_without_dense[0] != is_without_dense[1]:
        ignored.add("ffn_hidden_size")

    for part in dict.fromkeys([*run_parts, *checkpoint_parts]):
        if part in NOT_COMPARED_PARTS:
            continue
        run_values = run_parts.get(part, {})
        checkpoint_values = checkpoint_parts.get(part, {})
        defaults = own_defaults
        if part in COMPONENTS:
            defaults = {field.name: default_of(field) for field in option_fields(COMPONENTS[part])}

        for name in dict.fromkeys([*run_values, *checkpoint_values]):
            # the two values; lists by layer are equal if they say the same of each layer
            before = checkpoint_values.get(name, defaults.get(name))
            now = run_values.get(name)
            is_new = part == "own" and name not in checkpoint_values
            change = Change(name, before, now, is_unknown=name not in run_values, is_new=is_new)
            if name in ignored:
                continue
            num_layers = run_values.get("num_layers")
            is_equal = canonical_layer_pattern(name, before, num_layers) == canonical_layer_pattern(
                name, now, num_layers
            )
            if is_equal and not change.is_unknown:
                continue

            # the kind of the change
            of_model = part == "transformer" and name not in COURSE_OF_MODEL
            if part == "own":
                of_model = name in own_of_model
            if name in PRECISION:
                changes.precision.append(change)
            elif of_model and name in ROPE:
                changes.rope.append(change)
            elif of_model and name in BEGINS_AT_ZEROS and now is True and not before:
                changes.turned_on.append(change)
            elif of_model:
                changes.model.append(change)
            else:
                changes.course.append(change)
    return changes


OF_WIDTHS = ("hidden_size", "num_attention_heads", "ffn_hidden_size", "kv_channels", "swiglu")


def _in_force(parts: Parts) -> dict[str, dict[str, Any]]:
    """Return the settings, unset ones resolved to their effective values, and the script's own flags in one part."""
    resolved = {part: dict(settings) for part, settings in parts.items()}
    if "transformer" in resolved:
        model = resolved["transformer"]
        config = build(ModelConfig, {name: model[name] for name in OF_WIDTHS if name in model})
        model |= {"ffn_hidden_size": config.ffn_size, "kv_channels": config.head_width}
        if model.get("group_query_attention") and model.get("num_query_groups") == config.num_attention_heads:
            model |= {"group_query_attention": False, "num_query_groups": 1}  # as many groups as heads share nothing
        model |= canonical_expert_settings(model, config.ffn_size)
    if "data" in resolved:
        resolved["data"]["split"] = resolved["data"].get("split") or DEFAULT_SPLIT
    if "own_model" in resolved:
        resolved["own"] = resolved.get("own", {}) | resolved.pop("own_model")
    return resolved


def precision_of(model: Mapping[str, Any]) -> str:
    """Return the training precision of a model's settings, in words."""
    precision = next((name for name in ("bf16", "fp16", "fp64") if model.get(name)), "fp32")
    if model.get("fp32_residual_connection"):
        precision += " with its residual stream in fp32"
    return precision
