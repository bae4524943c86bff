"""List the arguments of Megatron-LM that do not change what a trained model computes. No torch.

An argument that is neither read nor listed here may change the model: a note names it to the reader of the checkpoint.
The words and names are those of all of Megatron-LM's releases, and of its main branch of August 2026.
"""

from collections.abc import Collection, Mapping
from typing import Any

# The first word of arguments of: optimizers, schedules and batches; data and tokenizers; logs, checks and checkpoints; ranks and
# their communication; memory and precision; parts that must be off (read_megatron_args.py), so that further arguments about them
# do not matter.
_WORDS = """
account accumulate activations adam adlr align allow app async autocast barrier batch bert beta biencoder block cache
calc chat check checkpoint ckpt classes clip config consumed context cp cpu create cross cuda data dataloader ddp
deallocate decode decoupled decrease defer delay deprecated deterministic dino dist distrib distribute distributed dsa
dump empty encoder end eod ep error eval evidence exit expert external faiss fake filter fim finalize fine first flash
flight fp16 fp4 fp8 freeze fsdp ft full fully fused gdp global gpu grad gradient grpo gtp head hetereogenous
heterogeneous hierarchical high hybrid hysteresis ict img indexer inference init initial inprocess iter iteration
iterations keep kitchen kv langrl lazy legacy linear lion load local log logger logging logit logits loss lr main make
mamba manual mask masked megatron memory merge metadata mhc micro microbatch mid min mla mmap mock model modules
most mscale mtp multiple muon mup nccl no non null nvtx object offload offset one optimizer original otel outer output
overlap override pad padded param params patch per perform persist phase pin pipeline pretrained profile profiling
pytorch q quant query rampup rank recompute record refit replication report rerun reset result retriever retro return
reuse rl run runtime s3 sample save scaled scatter seed sequence set sft sgd sharp short skip skipped special split
standalone start step straggler strict suggested swin symmetric te tensor tensorboard test throughput tiktoken timers
timing titles tokenizer torch tp train transformer trust v valid validation variable verify virtual vision vocab wandb
warmup wd weight wgrad world wsd yaml yarn
"""
_FULL_NAMES = """
DDP_impl activation_func_fp8_input_store activation_offload_fraction add_position_embedding
apply_query_key_layer_scaling apply_rope_fusion apply_wd_to_qk_layernorm attention_backend attention_softmax_in_fp32
auto_detect_ckpt_format bias_activation_fusion bias_dropout_fusion bias_gelu_fusion bias_swiglu_fusion
calculate_per_token_loss clone_scatter_output_in_embedding decoder_first_pipeline_num_layers
decoder_last_pipeline_num_layers decoder_num_layers decoder_seq_length delta_offload_bytes_across_pp_ranks
disable_bf16_reduced_precision_matmul disable_chunked_prefill disable_jit_fuser disable_mamba_mem_eff_path
disable_msc_deprecated disable_parameter_transpose_cache disable_straggler_on_startup disable_symmetric_registration
embedding_init_method embedding_init_method_std embedding_path enable_autocast enable_chunked_prefill
enable_cuda_graph enable_experimental enable_ft_package enable_full_sharding_in_hsdp enable_gloo_process_groups
enable_msc enable_one_logger exp_avg_dtype exp_avg_sq_dtype finetune fp32_allreduce fp32_residual_connection
max_seqlen_per_dp_cp_rank max_tokens_to_oom mlp_chunks_for_prefill mlp_chunks_for_training moe_aux_loss_coeff
moe_deepep_num_sms moe_enable_deepep moe_enable_routing_replay moe_extended_tp moe_flex_dispatcher_backend
moe_grouped_gemm moe_hybridep_num_sms moe_input_jitter_eps moe_layer_recompute
moe_pad_expert_input_to_capacity moe_pad_experts_for_cuda_graph_inference moe_per_layer_logging moe_permute_fusion
moe_router_bias_update_rate moe_router_dtype moe_router_force_load_balancing moe_router_fusion
moe_router_load_balancing_type moe_router_padding_for_fp8 moe_router_padding_for_quantization
moe_shared_expert_overlap moe_token_dispatcher_type moe_token_dropping moe_upcycling_granularity
moe_use_legacy_grouped_gemm moe_use_upcycling moe_z_loss_coeff
mrope_section num_channels num_classes num_dataset_builder_threads num_distributed_optimizer_instances
num_layers_at_end_in_bf16 num_layers_at_start_in_bf16 num_layers_in_first_pipeline_stage
num_layers_in_last_pipeline_stage num_layers_per_virtual_pipeline_stage
num_microbatches_with_partial_activation_checkpoints num_speculative_tokens num_virtual_stages_per_pipeline_rank
num_workers qk_clip qk_clip_alpha qk_clip_threshold qk_head_dim qk_pos_emb_head_dim relative_attention_max_distance
relative_attention_num_buckets rng rotary_scaling_factor scheduler seq_length use_checkpoint_args
use_checkpoint_lr_scheduler use_checkpoint_opt_param_scheduler use_contiguous_buffers_in_ddp
use_contiguous_buffers_in_local_ddp use_cpu_initialization use_custom_fsdp use_dist_ckpt use_dist_ckpt_deprecated
use_distributed_optimizer use_flash_attn use_flashinfer_fused_rope use_fused_weighted_squared_relu use_gigatoken
use_gloo_process_groups use_grouped_gemm_for_dense_mlp use_grouped_gemm_for_shared_expert
use_inference_optimized_layers use_layer_wise_distributed_optimizer use_layer_wise_param_layout use_legacy_models
use_legacy_static_engine use_mamba_mem_eff_path use_mcore_models use_megatron_fsdp use_mp_args_from_checkpoint_args
use_nsys_profiler use_one_sent_docs use_persistent_ckpt_worker use_precision_aware_optimizer use_pytorch_profiler
use_ring_exchange_p2p use_sharp use_te_activation_func use_te_rng_tracker use_tokenizer_model_from_checkpoint_args
use_torch_fsdp2 use_torch_optimizer_for_cpu_offload use_tp_pp_dp_mapping use_transformer_engine_op_fuser
"""
_FIRST_WORDS = frozenset(_WORDS.split())
_NAMES = frozenset(_FULL_NAMES.split())
_OFF: tuple[Any, ...] = (None, False, 0, "", [], {}, "<dict>")
_SHOWN = 8  # names in a note


def note_about_unknown_args(args: Mapping[str, Any], read: Collection[str]) -> str:
    """Return a note about arguments that are on, not in `read`, and not listed here; "" if there are none."""
    names = []
    for name, value in sorted(args.items(), key=lambda item: item[0]):
        is_listed = name in read or name in _NAMES or name.split("_")[0] in _FIRST_WORDS
        if not is_listed and value not in _OFF:
            names.append(name)
    if not names:
        return ""
    shown = ", ".join(f"{name:.60} ({args[name]!r:.40})" for name in names[:_SHOWN])
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"its args {shown}{more} are not known here: if they change what the model computes, its numbers are wrong"
