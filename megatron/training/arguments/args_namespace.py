"""Megatron's scripts read `args`: a namespace of all flags that any of its releases has, settings here or not."""

import argparse
from collections.abc import Iterable, Mapping
from typing import Any

from megatron.core import parallel_state
from megatron.core.base.names_by_value import names_by_value
from megatron.training.arguments.config import Config
from megatron.training.arguments.ignored_and_refused_flags import OTHERS, OtherFlag


class Arguments(argparse.Namespace):
    """The result of `get_args()`. A script may add to it and assign.

    A run reads its settings from `Config`, which is frozen. So assigning another value to a setting changes what the
    script and `core_transformer_config_from_args(args)` read, and the first rank warns that it changes nothing else.
    """

    __slots__ = ("_fixed",)  # outside the dictionary, so that `vars(args)` has flags only

    def __new__(cls, *_: Any, **__: Any) -> "Arguments":
        namespace = super().__new__(cls)
        namespace._fixed = frozenset()  # also for a copy, which copies attributes without `__init__`
        return namespace

    def __init__(self, values: Mapping[str, Any], fixed: Iterable[str] = ()):
        """fixed: the settings among the names of `values`."""
        super().__init__(**values)
        self._fixed = frozenset(fixed)

    def __setattr__(self, name: str, value: Any) -> None:
        before = getattr(self, name, None)
        super().__setattr__(name, value)
        if name in self._fixed and value != before and parallel_state.launched_rank() == 0:
            print(
                f"WARNING: the script sets args.{name} to {value!r}, but the run keeps {before!r}; give it on the command "
                "line, or as args_defaults to pretrain()",
                flush=True,
            )

    def and_also(self, more: Mapping[str, Any]) -> "Arguments":
        """Return a copy in which `more` fills the settings that are missing or None."""
        values = dict(vars(self))
        for name, value in more.items():
            if values.get(name) is None:
                values[name] = value
        return Arguments(values, self._fixed)


def flags_without_a_setting(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of Megatron's flags that are no settings here, by Megatron's names.

    They are given, or Megatron's defaults.

    given: flag -> value, of such flags.
    """
    # the defaults: a switch is off
    values: dict[str, Any] = {}
    for flag, other in OTHERS.items():
        values[_name(flag)] = False if other.values == "0" else None
    values |= DEFAULTS

    # the given flags
    for flag, value in given.items():
        name = _switched_off(flag)
        if name is not None:
            values[name] = False
        else:
            values[_name(flag)] = _typed(OTHERS[flag], value)
    return values


def other_names_of(config: Config) -> dict[str, Any]:
    """Return settings by Megatron's other names for them, or as the type that they have there."""
    model = config.transformer
    checkpoint = config.checkpoint
    return {
        "layernorm_epsilon": model.norm_epsilon,
        "encoder_num_layers": model.num_layers,
        "encoder_seq_length": config.data.seq_length,
        "add_position_embedding": model.position_embedding_type == "learned_absolute",
        "squared_relu": model.activation == "squared-relu",
        "quick_geglu": model.activation == "quick-gelu" and model.gated,
        "openai_gelu": False,  # which is the default here
        **model.parsed_patterns,
        "no_load_optim": None if checkpoint.load_optim else True,
        "no_save_optim": None if checkpoint.save_optim else True,
    }


def flag_that_sets(name: str) -> str | None:
    """Return Megatron's flag, no setting here, whose value is the attribute `name`; None if there is none."""
    for flag in OTHERS:
        if _name(flag) == name:
            return flag
    return None


def switch_that_clears(name: str) -> str | None:
    """Return Megatron's switch, no setting here, that sets the attribute `name` to False; None if there is none."""
    for flag in OTHERS:
        if _switched_off(flag) == name:
            return flag
    return None


def _name(flag: str) -> str:
    return _NAMES.get(flag, flag.removeprefix("--").replace("-", "_"))


def _switched_off(flag: str) -> str | None:
    """Return the name that a switch like --no-bias-gelu-fusion sets to False; None for other flags."""
    own_name = _name(flag)
    name = _OFF.get(flag, own_name.removeprefix("no_").removeprefix("disable_"))
    if name != own_name and DEFAULTS.get(name) is True:
        return name
    return None


def _typed(flag: OtherFlag, given: Any) -> Any:
    """Return a flag's value with the type that Megatron's parser gives it.

    The metavar tells it: N is an integer, X a float, any other a text.
    """
    if isinstance(given, list):
        return [_typed(flag, value) for value in given]
    try:
        if flag.metavar == "N":
            return int(given)
        if flag.metavar == "X":
            return float(given)
    except ValueError:  # text where a number is expected
        pass
    return given


# Flag -> name, where the name is not the flag's own.
_NAMES = {
    "--fp8-format": "fp8",
    "--fp4-format": "fp4",
    "--inference-max-requests": "inference_max_batch_size",
    "--microbatch-group-size-per-virtual-pipeline-stage": "microbatch_group_size_per_vp_stage",
    "--overlap-p2p-communication-warmup-flush": "overlap_p2p_comm_warmup_flush",
    "--use-nccl-ub": "nccl_ub",
}
_OFF = {  # switch -> the name that it sets to False
    "--disable-gloo-process-groups": "enable_gloo_process_groups",
    "--disable-msc": "enable_msc",
    "--no-contiguous-buffers-in-local-ddp": "use_contiguous_buffers_in_local_ddp",
    "--no-initialization": "perform_initialization",
    "--no-overlap-p2p-communication": "overlap_p2p_comm",
    "--no-query-key-layer-scaling": "apply_query_key_layer_scaling",
    "--no-rope-fusion": "apply_rope_fusion",
    "--retro-no-verify-neighbor-count": "retro_verify_neighbor_count",
    "--torch-fsdp2-no-reshard-after-forward": "torch_fsdp2_reshard_after_forward",
}

# Megatron's defaults: a value, and the names that have it. A flag of ignored_and_refused_flags.py that is missing here is False,
# if it is a switch, or None.
_TABLE = """
    False: apply_wd_to_qk_layernorm checkpoint_activations create_all_gather_group
        dataloader_defer_npy_index_mmap dataloader_fast_cache_load ddp_reduce_scatter_with_fp32_accumulation
        disable_jit_fuser distribute_checkpointed_activations enable_one_logger fake_process_group
        fsdp_manual_registration inference_wandb_logging keep_fp8_transpose_cache_when_using_custom_fsdp
        mmap_warmup nccl_ub overlap_p2p_comm_warmup_flush override_lr_scheduler recompute_activations
        retro_return_doc_ids rl_offload_inference_model_weights_when_idle rl_skip_bos_token
        rl_training_cuda_graphs rl_verify_model_weights_swap tokenizer_hf_include_special_tokens
        tokenizer_hf_use_fast tokenizer_sentencepiece_legacy use_checkpoint_lr_scheduler
        use_rotary_position_embeddings
    None: async_save fp8 inference_dynamic_batching_max_requests inference_dynamic_batching_max_tokens
        inference_dynamic_batching_paused_buffer_size_gb linear_attention_freq
        microbatch_group_size_per_vp_stage no_load_rng no_save_rng no_weight_decay_cond_type onnx_safe
        per_dataset_sequences_path phase_transition_iterations retro_workdir
        rl_inference_expert_model_parallel_size rl_inference_expert_tensor_model_parallel_size
        rl_inference_pipeline_model_parallel_size rl_inference_tensor_model_parallel_size
        tokenizer_special_tokens use_cpu_initialization yaml_cfg
    True: align_grad_reduce align_param_gather apply_rope_fusion async_tensor_model_parallel_allreduce
        bias_dropout_fusion bias_gelu_fusion bias_swiglu_fusion ckpt_fully_parallel_save
        clone_scatter_output_in_embedding create_attention_mask_in_dataloader data_sharding delay_grad_reduce
        enable_gloo_process_groups enable_msc fp8_wgrad gradient_accumulation_fusion gradient_reduce_div_fusion
        manual_gc_eval masked_softmax_fusion overlap_p2p_comm perform_initialization pin_cpu_grads
        pin_cpu_params retro_verify_neighbor_count torch_fsdp2_reshard_after_forward tp_comm_bulk_dgrad
        tp_comm_bulk_wgrad tp_comm_overlap_ag tp_comm_overlap_rs tp_comm_split_ag tp_comm_split_rs
        use_contiguous_buffers_in_local_ddp use_tokenizer_model_from_checkpoint_args
    "": config_logger_dir
    "0.0.0": app_tag_run_version
    "allgather": moe_token_dispatcher_type
    "assume_ok_unexpected": dist_ckpt_strictness
    "aux_loss": moe_router_load_balancing_type
    "classify": vision_pretraining_type
    "delayed": fp8_recipe
    "fifo": rl_sequence_packing_algo
    "fp32": exp_avg_dtype exp_avg_sq_dtype main_params_dtype
    "full": cuda_graph_scope
    "fully_parallel": non_persistent_local_ckpt_algo
    "gloo": refit_method
    "inplace_megatron": langrl_inference_server_type
    "local": DDP_impl transformer_impl
    "megatron": bert_embedder_type
    "megatron-lm": one_logger_project
    "mmap": data_impl
    "most_recent": fp8_amax_compute_algo
    "native": cross_entropy_fusion_impl
    "nccl": tp_comm_bootstrap_backend
    "nemotron-h-aligned": sft_tokenizer_prompt_format
    "node": inprocess_granularity
    "probs": moe_token_drop_policy
    "random": mask_type
    "softmax": moe_router_score_function
    "tiny": swin_backbone_type
    "torch_dist": ckpt_format
    "vit": vision_backbone_type
    -1: inference_batch_times_seqlen_threshold rl_default_top_k
    0: biencoder_projection_dim encoder_pipeline_model_parallel_size encoder_tensor_model_parallel_size
        fp8_margin inference_dynamic_batching_unified_memory_level
        inference_logging_step_interval manual_gc_interval rl_default_top_p
        rl_inference_model_unified_memory_level wgrad_deferral_limit
    0.0: grpo_entropy_term_weight hybrid_attention_ratio hybrid_mlp_ratio moe_aux_loss_coeff
    0.001: grpo_kl_beta moe_router_bias_update_rate
    0.01: grpo_clamp_eps_lower grpo_clamp_eps_upper
    0.04: dino_warmup_teacher_temp
    0.07: dino_teacher_temp
    0.1: mtp_loss_scaling_factor query_in_block_prob retro_encoder_attention_dropout
        retro_encoder_hidden_dropout
    0.2: inference_dynamic_batching_buffer_guaranteed_fraction
    1: checkpoint_num_layers dino_freeze_last_layer fp8_amax_history_len fp8_interval inprocess_last_call_wait
        inprocess_termination_grace_time moe_layer_freq moe_upcycling_granularity num_dataset_builder_threads
        num_layers_at_end_in_bf16 num_layers_at_start_in_bf16 retro_attention_gate
    1.0: classes_fraction data_per_class_fraction head_lr_mult inprocess_monitor_process_interval
        inprocess_monitor_thread_interval inprocess_progress_watchdog_interval mask_factor mscale mscale_all_dim
        rl_default_temperature rotary_scaling_factor sample_rate
    10: dino_local_crops_number
    1000: adlr_autoresume_interval indexer_log_interval num_classes
    120: inprocess_barrier_timeout inprocess_completion_timeout
    12000: max_tokens_to_oom
    12346: inference_coordinator_port
    1250: iter_per_epoch
    128: indexer_batch_size mamba_state_dim qk_head_dim relative_attention_max_distance v_head_dim
    16: inference_dynamic_batching_cuda_graph_mixed_prefill_count inference_dynamic_batching_num_cuda_graphs
        patch_dim
    16384: inference_dynamic_batching_cuda_graph_max_tokens
    2: grpo_group_size grpo_iterations moe_router_topk replication_factor retro_encoder_layers
        retro_num_neighbors retro_num_retrieved_chunks
    2048: dino_head_hidden_size
    224: img_dim img_h img_w
    256: dino_bottleneck_size inference_dynamic_batching_block_size retriever_seq_length
    2560: inference_max_seq_length
    3: cuda_graph_warmup_steps num_channels
    30: dino_warmup_teacher_temp_epochs inprocess_heartbeat_interval
    32: grpo_prompts_per_step kv_lora_rank relative_attention_num_buckets rl_prompts_per_eval
    40.0: inference_dynamic_batching_buffer_size_gb
    5: ft_num_warmup_iters
    50: rl_sequence_packing_max_sequences_per_bin
    512: rl_parallel_generation_tasks
    60: inprocess_heartbeat_timeout inprocess_soft_timeout
    64: mamba_head_dim qk_pos_emb_head_dim
    65535: straggler_ctrlr_port
    8: inference_max_batch_size mamba_num_groups
    90: inprocess_hard_timeout
    96: dino_local_img_size
    []: high_priority_stream_groups retriever_report_topk_accuracies
"""


DEFAULTS = names_by_value(_TABLE)
