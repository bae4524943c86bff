"""Megatron's scripts read `args`: a namespace of all flags that any of its releases has, settings here or not."""

import argparse
from collections.abc import Iterable, Mapping
from typing import Any

from megatron.core import parallel_state
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


def unsupported_flag_values(given: Mapping[str, Any]) -> dict[str, Any]:
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
        "layernorm_zero_centered_gamma": model.apply_layernorm_1p,
        "muon_use_nesterov": config.optimizer.muon_nesterov,
        "use_custom_fsdp": config.data_parallel.use_megatron_fsdp,
        "openai_gelu": False,  # which is the default here
        **model.parsed_patterns,
        "no_load_optim": None if checkpoint.load_optim else True,
        "no_save_optim": None if checkpoint.save_optim else True,
    }


def megatron_only_flag_for(name: str) -> str | None:
    """Return Megatron's flag, no setting here, whose value is the attribute `name`; None if there is none."""
    for flag in OTHERS:
        if _name(flag) == name:
            return flag
    return None


def megatron_only_switch_clearing(name: str) -> str | None:
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
    if name == own_name:
        return None
    has_positive_form = f"--{name}".replace("_", "-") in OTHERS  # such as --rl-profile beside --no-rl-profile
    return name if DEFAULTS.get(name) is True or name in _OFF.values() or has_positive_form else None


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
    "--inference-dynamic-batching-prefix-caching": "inference_dynamic_batching_enable_prefix_caching",
    "--overlap-p2p-communication-warmup-flush": "overlap_p2p_comm_warmup_flush",
    "--use-nccl-ub": "nccl_ub",
}
_OFF = {  # switch -> the name that it sets to False
    "--disable-gloo-process-groups": "enable_gloo_process_groups",
    "--disable-mamba-mem-eff-path": "use_mamba_mem_eff_path",
    "--disable-msc": "enable_msc",
    "--no-contiguous-buffers-in-local-ddp": "use_contiguous_buffers_in_local_ddp",
    "--no-initialization": "perform_initialization",
    "--no-overlap-p2p-communication": "overlap_p2p_comm",
    "--no-inference-dynamic-batching-prefix-caching": "inference_dynamic_batching_enable_prefix_caching",
    "--no-query-key-layer-scaling": "apply_query_key_layer_scaling",
    "--no-rope-fusion": "apply_rope_fusion",
    "--retro-no-verify-neighbor-count": "retro_verify_neighbor_count",
    "--torch-fsdp2-no-reshard-after-forward": "torch_fsdp2_reshard_after_forward",
    "--use-same-sampling-seed-across-dp-ranks": "offset_sampling_seed_by_dp_rank",
}

# Megatron's defaults. A flag of ignored_and_refused_flags.py that is missing here is False, if it is a switch, or None.
DEFAULTS: dict[str, Any] = {
    "activation_offload_fraction": 1.0,
    "adlr_autoresume_interval": 1000,
    "align_grad_reduce": True,
    "align_param_gather": True,
    "app_tag_run_version": "0.0.0",
    "apply_rope_fusion": True,
    "apply_wd_to_qk_layernorm": False,
    "async_ckpt_cpu_priority": 10,
    "async_ckpt_io_priority": 3,
    "async_save": None,
    "async_strategy": "nvrx",
    "async_tensor_model_parallel_allreduce": True,
    "bert_embedder_type": "megatron",
    "bias_dropout_fusion": True,
    "bias_gelu_fusion": True,
    "bias_swiglu_fusion": True,
    "biencoder_projection_dim": 0,
    "checkpoint_activations": False,
    "checkpoint_num_layers": 1,
    "ckpt_format": "torch_dist",
    "ckpt_fully_parallel_load_exchange_algo": "broadcast",
    "ckpt_fully_parallel_load_process_group": "dp",
    "ckpt_fully_parallel_save": True,
    "ckpt_fully_parallel_save_deprecated": False,
    "ckpt_fully_parallel_save_process_group": "dp",
    "ckpt_load_validate_sharding_integrity": True,
    "classes_fraction": 1.0,
    "clone_scatter_output_in_embedding": True,
    "config_logger_dir": "",
    "create_all_gather_group": False,
    "create_attention_mask_in_dataloader": True,
    "cross_entropy_fusion_impl": "native",
    "cuda_graph_impl": "none",
    "cuda_graph_modules": [],
    "cuda_graph_scope": "full",
    "cuda_graph_scope_deprecated": None,
    "cuda_graph_warmup_steps": 3,
    "data_impl": "mmap",
    "data_per_class_fraction": 1.0,
    "data_sharding": True,
    "dataloader_defer_npy_index_mmap": False,
    "dataloader_fast_cache_load": False,
    "DDP_impl": "local",
    "ddp_param_name_patterns_for_fp32_local_accumulation": [],
    "ddp_reduce_scatter_with_fp32_accumulation": False,
    "delay_grad_reduce": True,
    "delta_offload_bytes_across_pp_ranks": 0,
    "deprecated_use_mcore_models": False,
    "dino_bottleneck_size": 256,
    "dino_freeze_last_layer": 1,
    "dino_head_hidden_size": 2048,
    "dino_local_crops_number": 10,
    "dino_local_img_size": 96,
    "dino_teacher_temp": 0.07,
    "dino_warmup_teacher_temp": 0.04,
    "dino_warmup_teacher_temp_epochs": 30,
    "disable_jit_fuser": False,
    "disable_msc_deprecated": False,
    "dist_ckpt_format_deprecated": None,
    "dist_ckpt_strictness": "assume_ok_unexpected",
    "dist_ckpt_workers": 1,
    "distribute_checkpointed_activations": False,
    "dsa_indexer_rotate_activation": True,
    "dsa_indexer_scoring_relu": True,
    "dsa_indexer_skip_topk_offset": 0,
    "dsa_indexer_topk_freq": 1,
    "dsa_kernel_backend": "none",
    "enable_gloo_process_groups": True,
    "enable_msc": True,
    "enable_one_logger": False,
    "encoder_pipeline_model_parallel_size": 0,
    "encoder_tensor_model_parallel_size": 0,
    "exp_avg_dtype": "fp32",
    "exp_avg_sq_dtype": "fp32",
    "fake_process_group": False,
    "flight_recorder_dump_on_timeout": True,
    "flight_recorder_extra_dump_on_exec": True,
    "flight_recorder_include_only_active": True,
    "flight_recorder_trace_buffer_size": 2000,
    "fp4_recipe": "nvfp4",
    "fp8": None,
    "fp8_amax_compute_algo": "most_recent",
    "fp8_amax_history_len": 1,
    "fp8_interval": 1,
    "fp8_margin": 0,
    "fp8_recipe": "delayed",
    "fp8_wgrad": True,
    "fsdp_manual_registration": False,
    "ft_num_warmup_iters": 5,
    "gradient_accumulation_fusion": True,
    "gradient_reduce_div_fusion": True,
    "grpo_clamp_eps_lower": 0.01,
    "grpo_clamp_eps_upper": 0.01,
    "grpo_default_temperature": 1.0,
    "grpo_default_top_p": 0,
    "grpo_entropy_term_weight": 0.0,
    "grpo_group_size": 2,
    "grpo_iterations": 2,
    "grpo_kl_beta": 0.001,
    "grpo_prompts_per_step": 32,
    "head_lr_mult": 1.0,
    "high_priority_stream_groups": [],
    "hybrid_attention_ratio": 0.0,
    "hybrid_mlp_ratio": 0.0,
    "img_dim": 224,
    "img_h": 224,
    "img_w": 224,
    "indexer_batch_size": 128,
    "indexer_log_interval": 1000,
    "inference_batch_times_seqlen_threshold": -1,
    "inference_coordinator_port": 12346,
    "inference_cuda_graph_max_tokens": 512,
    "inference_dynamic_batching_async_sched_mode": "legacy",
    "inference_dynamic_batching_block_size": 256,
    "inference_dynamic_batching_buffer_guaranteed_fraction": 0.2,
    "inference_dynamic_batching_buffer_size_gb": 40.0,
    "inference_dynamic_batching_chunk_size": 256,
    "inference_dynamic_batching_cuda_graph_max_tokens": 16384,
    "inference_dynamic_batching_cuda_graph_mixed_prefill_count": 16,
    "inference_dynamic_batching_cuda_graph_sizing_distribution": "exponential",
    "inference_dynamic_batching_enable_prefix_caching": False,
    "inference_dynamic_batching_logprobs_mode": "raw_logprobs",
    "inference_dynamic_batching_max_requests": None,
    "inference_dynamic_batching_max_tokens": None,
    "inference_dynamic_batching_num_cuda_graphs": 16,
    "inference_dynamic_batching_paused_buffer_size_gb": None,
    "inference_dynamic_batching_prefix_caching_coordinator_policy": "load_balanced",
    "inference_dynamic_batching_prefix_caching_eviction_policy": "ref_zero",
    "inference_dynamic_batching_prefix_caching_routing_alpha": 0.5,
    "inference_dynamic_batching_sampling_backend": "torch",
    "inference_dynamic_batching_unified_memory_level": 0,
    "inference_grouped_gemm_backend": "vllm",
    "inference_logging_step_interval": 0,
    "inference_max_batch_size": 8,
    "inference_max_requests": 8,
    "inference_max_seq_length": 2560,
    "inference_wandb_logging": False,
    "inprocess_active_world_size": 1,
    "inprocess_barrier_timeout": 120,
    "inprocess_completion_timeout": 120,
    "inprocess_granularity": "node",
    "inprocess_hard_timeout": 90,
    "inprocess_heartbeat_interval": 30,
    "inprocess_heartbeat_timeout": 60,
    "inprocess_last_call_wait": 1,
    "inprocess_monitor_process_interval": 1.0,
    "inprocess_monitor_thread_interval": 1.0,
    "inprocess_progress_watchdog_interval": 1.0,
    "inprocess_soft_timeout": 60,
    "inprocess_termination_grace_time": 1,
    "iter_per_epoch": 1250,
    "keep_fp8_transpose_cache_when_using_custom_fsdp": False,
    "kitchen_attention_backend": "sdpa",
    "kv_lora_rank": 32,
    "langrl_inference_server_type": "inplace_megatron",
    "lazy_mpu_init": False,
    "linear_attention_freq": None,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_value_head_dim": 128,
    "lion_beta1": 0.95,
    "lion_beta2": 0.98,
    "logits_load_decode_threads": 4,
    "logits_load_kd_loss_alpha": 1.0,
    "logits_load_msc_prefetch_depth": 2,
    "logits_load_prefetch_factor": 3,
    "logits_save_dtype": "fp16",
    "logits_save_top_p_min_k": 1,
    "main_params_dtype": "fp32",
    "mamba_head_dim": 64,
    "mamba_inference_conv_states_dtype": "bf16",
    "mamba_inference_ssm_states_dtype": "bf16",
    "mamba_num_groups": 8,
    "mamba_state_dim": 128,
    "manual_gc_eval": True,
    "manual_gc_interval": 0,
    "mask_factor": 1.0,
    "mask_type": "random",
    "masked_softmax_fusion": True,
    "max_tokens_to_oom": 12000,
    "megatron_fsdp_grad_comm_dtype": "auto",
    "megatron_fsdp_main_grads_dtype": "auto",
    "megatron_fsdp_main_params_dtype": "fp32",
    "metadata_path": None,
    "mlp_chunks_for_prefill": 1,
    "mlp_chunks_for_training": 1,
    "mmap_warmup": False,
    "moe_upcycling_granularity": 1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "mtp_loss_scaling_factor": 0.1,
    "muon_tp_mode": "blockwise",
    "mup_attn_scale_power": 1.0,
    "mup_embedding_mult": 1.0,
    "mup_output_mult": 1.0,
    "mup_width_mult": 1.0,
    "nccl_ub": False,
    "no_load_rng": None,
    "no_save_rng": None,
    "no_weight_decay_cond_type": None,
    "non_persistent_local_ckpt_algo": "fully_parallel",
    "null_tokenizer_pad_id": -1,
    "num_channels": 3,
    "num_classes": 1000,
    "num_dataset_builder_threads": 1,
    "num_layers_at_end_in_bf16": 1,
    "num_layers_at_start_in_bf16": 1,
    "num_speculative_tokens": 0,
    "offload_modules": [],
    "offset_sampling_seed_by_dp_rank": True,
    "one_logger_project": "megatron-lm",
    "onnx_safe": None,
    "overlap_p2p_comm": True,
    "overlap_p2p_comm_warmup_flush": False,
    "override_lr_scheduler": False,
    "patch_dim": 16,
    "per_dataset_sequences_path": None,
    "perform_initialization": True,
    "phase_transition_iterations": None,
    "pin_cpu_grads": True,
    "pin_cpu_params": True,
    "qk_clip_alpha": 0.5,
    "qk_clip_threshold": 100,
    "qk_head_dim": 128,
    "qk_pos_emb_head_dim": 64,
    "query_in_block_prob": 0.1,
    "recompute_activations": False,
    "refit_method": "gloo",
    "relative_attention_max_distance": 128,
    "relative_attention_num_buckets": 32,
    "renormalize_blend_weights": False,
    "replication_factor": 2,
    "retriever_report_topk_accuracies": [],
    "retriever_seq_length": 256,
    "retro_attention_gate": 1,
    "retro_encoder_attention_dropout": 0.1,
    "retro_encoder_hidden_dropout": 0.1,
    "retro_encoder_layers": 2,
    "retro_num_neighbors": 2,
    "retro_num_retrieved_chunks": 2,
    "retro_return_doc_ids": False,
    "retro_verify_neighbor_count": True,
    "retro_workdir": None,
    "rl_consumption_granularity": "B",
    "rl_default_temperature": 1.0,
    "rl_default_top_k": -1,
    "rl_default_top_p": 0,
    "rl_generation_lag": 0,
    "rl_inference_expert_model_parallel_size": None,
    "rl_inference_expert_tensor_model_parallel_size": None,
    "rl_inference_model_unified_memory_level": 0,
    "rl_inference_parsers": [],
    "rl_inference_pipeline_model_parallel_size": None,
    "rl_inference_tensor_model_parallel_size": None,
    "rl_kv_cache_management_mode": "persist",
    "rl_offload_inference_model_weights_when_idle": False,
    "rl_parallel_generation_tasks": 512,
    "rl_prompts_per_eval": 32,
    "rl_sequence_packing_algo": "fifo",
    "rl_sequence_packing_bin_size": 8192,
    "rl_sequence_packing_max_sequences_per_bin": 50,
    "rl_skip_bos_token": False,
    "rl_submission_granularity": "B",
    "rl_training_cuda_graphs": False,
    "rl_verify_model_weights_swap": False,
    "rotary_scaling_factor": 1.0,
    "sample_rate": 1.0,
    "sft_tokenizer_prompt_format": "nemotron-h-aligned",
    "special_tokens": None,
    "straggler_ctrlr_port": 65535,
    "stream_ckpt_dequant": True,
    "strict_fsdp_dtensor_load": True,
    "swin_backbone_type": "tiny",
    "tokenizer_hf_include_special_tokens": False,
    "tokenizer_hf_use_fast": False,
    "tokenizer_sentencepiece_ignore_extra_whitespaces": True,
    "tokenizer_sentencepiece_legacy": False,
    "tokenizer_special_tokens": None,
    "torch_fsdp2_reshard_after_forward": True,
    "tp_comm_bootstrap_backend": "nccl",
    "tp_comm_bulk_dgrad": True,
    "tp_comm_bulk_wgrad": True,
    "tp_comm_overlap_ag": True,
    "tp_comm_overlap_rs": True,
    "tp_comm_split_ag": True,
    "tp_comm_split_rs": True,
    "transformer_impl": "local",
    "use_checkpoint_lr_scheduler": False,
    "use_contiguous_buffers_in_local_ddp": True,
    "use_cpu_initialization": None,
    "use_dist_ckpt_deprecated": False,
    "use_gloo_process_groups": True,
    "use_layer_wise_param_layout": True,
    "use_mamba_mem_eff_path": True,
    "use_rotary_position_embeddings": False,
    "use_tokenizer_model_from_checkpoint_args": True,
    "v_head_dim": 128,
    "vision_backbone_type": "vit",
    "vision_pretraining_type": "classify",
    "wgrad_deferral_limit": 0,
    "yaml_cfg": None,
    "yarn_correction_range_round_to_int": None,
}
