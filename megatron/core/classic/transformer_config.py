"""`TransformerConfig` with the fields of Megatron core 0.5 to 0.16, which scripts read, assign and extend.

TransformerConfig(num_layers=2, hidden_size=12, num_attention_heads=4)
core_transformer_config_from_args(args)         of the command line
model_config(config)                            the settings that our layers are built from
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, make_dataclass, replace
from typing import Any

import torch
from torch.nn import functional

from megatron.core.classic.utils import init_method_normal, scaled_init_method_normal
from megatron.core.config import ConfigError
from megatron.core.tables import names_by_value
from megatron.core.transformer.model_config import ModelConfig

# Megatron's defaults: a value, and the fields that have it.
_TABLE = """
    False: account_for_embedding_in_pipeline_split account_for_loss_in_pipeline_split
        activation_func_fp8_input_store add_qkv_bias apply_query_key_layer_scaling
        apply_residual_connection_post_layernorm apply_rope_fusion async_tensor_model_parallel_allreduce
        attention_output_gate batch_invariant_mode bf16 bias_activation_fusion bias_dropout_fusion
        calculate_per_token_loss cpu_offloading cpu_offloading_double_buffering cross_entropy_loss_fusion
        cuda_graph_retain_backward_graph cuda_graph_use_single_mempool deallocate_pipeline_outputs
        defer_embedding_wgrad_compute delay_wgrad_compute deterministic_mode
        disable_bf16_reduced_precision_matmul disable_parameter_transpose_cache dsa_indexer_use_sparse_loss
        enable_autocast enable_cuda_graph ep_overlap_early_attn_memory_release external_cuda_graph
        fine_grained_activation_offloading first_last_layers_bf16 flash_decode fp16 fp32_residual_connection
        fp4_param fp8_dot_product_attention fp8_multi_head_attention fp8_param fused_single_qkv_rope
        gated_linear_unit gradient_accumulation_fusion hetereogenous_dist_checkpoint heterogeneous_block_specs
        hybrid_context_parallel inference_fuse_tp_communication inference_rng_tracker
        init_model_with_meta_device is_hybrid_model layernorm_zero_centered_gamma log_max_attention_logit
        masked_softmax_fusion memory_efficient_layer_norm moe_apply_probs_on_input moe_enable_deepep
        moe_enable_routing_replay moe_extended_tp moe_grouped_gemm moe_layer_recompute
        moe_pad_expert_input_to_capacity moe_per_layer_logging moe_permute_fusion moe_router_enable_expert_bias
        moe_router_force_load_balancing moe_router_fusion moe_router_padding_for_fp8
        moe_router_padding_for_quantization moe_router_pre_softmax moe_shared_expert_gate
        moe_shared_expert_overlap moe_token_dropping moe_use_legacy_grouped_gemm mtp_standalone
        multi_latent_attention overlap_moe_expert_parallel_comm overlap_p2p_comm overlap_p2p_comm_warmup_flush
        persist_layer_norm qk_clip qk_l2_norm qk_layernorm rotary_interleaved sequence_parallel test_mode
        tp_comm_atomic_ag tp_comm_atomic_rs tp_comm_overlap tp_comm_overlap_disable_fc1
        tp_comm_overlap_disable_qkv tp_comm_overlap_rs_dgrad tp_only_amax_red use_cpu_initialization
        use_fused_weighted_squared_relu use_inference_optimized_layers use_kitchen use_kitchen_attention
        use_ring_exchange_p2p use_te_activation_func use_te_rng_tracker variable_seq_lengths
    None: activation_func_clamp_value autocast_dtype cp_comm_type distribute_saved_activations
        dsa_indexer_head_dim dsa_indexer_loss_coeff dsa_indexer_n_heads dsa_indexer_topk embedding_init_method
        embedding_init_method_std experimental_attention_variant expert_tensor_parallel_size ffn_hidden_size
        finalize_model_grads_func fp4 fp4_quantizer_factory fp8 fp8_quantizer_factory grad_scale_func
        grad_sync_func hierarchical_context_parallel_sizes init_method kv_channels linear_attention_freq
        mamba_num_heads max_seqlen_per_dp_cp_rank microbatch_group_size_per_vp_stage moe_expert_capacity_factor
        moe_ffn_hidden_size moe_input_jitter_eps moe_latent_size moe_router_dtype moe_router_group_topk
        moe_router_num_groups moe_router_topk_limited_devices moe_router_topk_scaling_factor
        moe_shared_expert_intermediate_size moe_z_loss_coeff mrope_section mtp_loss_scaling_factor
        mtp_num_layers no_rope_freq no_sync_func num_layers_in_first_pipeline_stage
        num_layers_in_last_pipeline_stage num_microbatches_with_partial_activation_checkpoints num_moe_experts
        num_query_groups output_layer_init_method param_sync_func pipeline_dtype
        pipeline_model_parallel_comm_backend pipeline_model_parallel_layout pipeline_model_parallel_split_rank
        quant_recipe recompute_granularity recompute_method recompute_modules recompute_num_layers softmax_scale
        symmetric_ar_type timers virtual_pipeline_model_parallel_size window_attn_skip_freq window_size
    True: add_bias_linear attention_softmax_in_fp32 barrier_with_L1_time batch_p2p_comm batch_p2p_sync
        clone_scatter_output_in_embedding cpu_offloading_activations cpu_offloading_weights fp8_wgrad
        perform_initialization tp_comm_bulk_dgrad tp_comm_bulk_wgrad tp_comm_overlap_ag tp_comm_overlap_rs
        tp_comm_split_ag tp_comm_split_rs use_mamba_mem_eff_path
    "": config_logger_dir
    "LayerNorm": normalization
    "allgather": moe_token_dispatcher_type
    "auto": attention_backend
    "aux_loss": moe_router_load_balancing_type
    "deepep": moe_flex_dispatcher_backend
    "delayed": fp8_recipe
    "float32": params_dtype
    "full": cuda_graph_scope
    "gelu": activation_func
    "most_recent": fp8_amax_compute_algo
    "native": cross_entropy_fusion_impl
    "nccl": tp_comm_bootstrap_backend
    "none": cuda_graph_impl
    "nvfp4": fp4_recipe
    "probs": moe_token_drop_policy
    "sdpa": kitchen_attention_backend
    "softmax": moe_router_score_function
    "transformer_engine": transformer_impl
    "vanilla": softmax_type
    0: cpu_offloading_num_layers fp8_margin hidden_size moe_aux_loss_coeff num_attention_heads num_layers
        wgrad_deferral_limit
    0.0: glu_linear_offset
    0.001: moe_router_bias_update_rate
    0.02: init_method_std
    0.1: attention_dropout hidden_dropout
    0.5: qk_clip_alpha
    1: context_parallel_size expert_model_parallel_size fp8_amax_history_len fp8_interval mlp_chunks_for_prefill
        moe_layer_freq num_layers_at_end_in_bf16 num_layers_at_start_in_bf16 pipeline_model_parallel_size
        tensor_model_parallel_size
    100: qk_clip_threshold
    1048576: min_offloaded_tensor_size
    128: linear_key_head_dim linear_value_head_dim mamba_state_dim
    16: linear_num_key_heads moe_hybridep_num_sms
    1e-05: layernorm_epsilon
    2: moe_router_topk
    20: moe_deepep_num_sms
    3: cuda_graph_warmup_steps
    32: linear_num_value_heads
    4: linear_conv_kernel_dim
    42: inference_sampling_seed
    64: mamba_head_dim
    8: mamba_num_groups
    []: offload_modules
"""
_DEFAULTS = names_by_value(_TABLE)
_OF_RANKS = [
    name for name in _DEFAULTS if name.endswith("parallel_size") or name in ("sequence_parallel", "params_dtype")
]
# Fields that would change what is computed, and that nothing here computes.
_NOT_BUILT = """
    activation_func_clamp_value apply_residual_connection_post_layernorm attention_output_gate context_parallel_size
    embedding_init_method embedding_init_method_std experimental_attention_variant expert_model_parallel_size
    first_last_layers_bf16 fp4 fp8 glu_linear_offset heterogeneous_block_specs layernorm_zero_centered_gamma
    linear_attention_freq mtp_num_layers multi_latent_attention no_rope_freq num_moe_experts pipeline_model_parallel_layout
    qk_clip qk_l2_norm rotary_interleaved softmax_scale softmax_type variable_seq_lengths
"""


def _dataclass_of(name: str, names: Mapping[str, Any], bases: tuple[type, ...] = ()) -> type:
    """A dataclass with these fields and defaults."""
    of_fields = [
        (one, Any, field(default_factory=list) if value == [] else field(default=value)) for one, value in names.items()
    ]
    return make_dataclass(name, of_fields, bases=bases)


_Ranks = _dataclass_of("_Ranks", {name: _DEFAULTS[name] for name in _OF_RANKS})
_Fields = _dataclass_of("_Fields", {name: _DEFAULTS[name] for name in _DEFAULTS if name not in _OF_RANKS}, (_Ranks,))


@dataclass
class ModelParallelConfig(_Ranks):
    """How many ranks share a layer, and in which dtype."""

    def __post_init__(self) -> None:
        if isinstance(self.params_dtype, str):
            self.params_dtype = getattr(torch, self.params_dtype)


@dataclass
class TransformerConfig(_Fields, ModelParallelConfig):
    """A model's settings by Megatron's names. Fields that are built nowhere here are refused once a model is made of them."""

    def __post_init__(self) -> None:
        ModelParallelConfig.__post_init__(self)
        self.activation_func = functional.gelu if self.activation_func == "gelu" else self.activation_func
        self.ffn_hidden_size = self.ffn_hidden_size or 4 * self.hidden_size
        self.num_query_groups = self.num_query_groups or self.num_attention_heads
        self.kv_channels = self.kv_channels or self.hidden_size // max(1, self.num_attention_heads)
        self.init_method = self.init_method or init_method_normal(self.init_method_std)
        scaled = scaled_init_method_normal(self.init_method_std, max(1, self.num_layers))
        self.output_layer_init_method = self.output_layer_init_method or scaled


def core_transformer_config_from_args(args: Any, config_class: type | None = None) -> Any:
    """The model's settings as a `config_class`: TransformerConfig, a subclass, or any dataclass, whose fields `args` fills by
    their names. What `args` lacks, or holds as None, keeps its default."""
    config_class = config_class or TransformerConfig
    values = {one.name: getattr(args, one.name, None) for one in fields(config_class)}
    if issubclass(config_class, TransformerConfig):
        flags = {name for name, on in vars(args).items() if on is True}
        kinds = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp64": torch.float64}
        params_dtype = next((dtype for name, dtype in kinds.items() if name in flags), torch.float32)
        gated = {"gated_linear_unit": True, "activation_func": functional.silu} if "swiglu" in flags else {}
        values |= gated | {
            "params_dtype": params_dtype,
            "pipeline_dtype": torch.float32 if "fp32_residual_connection" in flags else params_dtype,
            "layernorm_epsilon": getattr(args, "norm_epsilon", None),
            "num_query_groups": args.num_query_groups if "group_query_attention" in flags else None,
            "num_layers_in_first_pipeline_stage": getattr(args, "decoder_first_pipeline_num_layers", None),
            "num_layers_in_last_pipeline_stage": getattr(args, "decoder_last_pipeline_num_layers", None),
        }
    return config_class(**{name: value for name, value in values.items() if value is not None})


def model_config(config: Any, base: ModelConfig | None = None, **options: Any) -> ModelConfig:
    """The settings that our layers are built from. base: of the run, for what Megatron's config has no field for. options:
    further settings by our names, of a model's own arguments. Raises ConfigError for what is not built."""
    if isinstance(config, ModelConfig):
        return replace(config, **options)
    if problems := _problems(config):
        raise ConfigError(problems)
    values = {one.name: getattr(config, one.name) for one in fields(ModelConfig) if one.name in _DEFAULTS}
    values |= {
        "norm_epsilon": config.layernorm_epsilon,
        "swiglu": config.gated_linear_unit,
        "group_query_attention": config.num_query_groups != config.num_attention_heads,
        "num_query_groups": config.num_query_groups if config.num_query_groups != config.num_attention_heads else 1,
        "bf16": config.bf16 or config.params_dtype is torch.bfloat16,
        "fp16": config.fp16 or config.params_dtype is torch.float16,
        "fp64": config.params_dtype is torch.float64,
        "window_size": ",".join(map(str, config.window_size)) if config.window_size else None,
        "window_attn_skip_freq": str(config.window_attn_skip_freq) if config.window_attn_skip_freq else None,
        "attention_backend": getattr(config.attention_backend, "name", config.attention_backend),
    }
    kept = ("recompute_modules", "distribute_saved_activations")  # None in Megatron where it means our default
    values = {name: value for name, value in values.items() if not (name in kept and value is None)}
    return replace(base or ModelConfig(), **{**values, **options})


def _problems(config: Any) -> list[str]:
    """Why our layers cannot compute what a config says."""
    asked = [name for name in _NOT_BUILT.split() if getattr(config, name, _DEFAULTS[name]) != _DEFAULTS[name]]
    problems = [f"TransformerConfig: {name}={getattr(config, name)!r} is not built yet; leave it out" for name in asked]
    known = functional.silu if config.gated_linear_unit else functional.gelu
    if config.activation_func is not known:
        name = getattr(config.activation_func, "__name__", config.activation_func)
        problems.append(
            f"TransformerConfig: activation_func {name} with gated_linear_unit={config.gated_linear_unit} is not built yet; use "
            "torch.nn.functional.gelu, or silu with gated_linear_unit=True"
        )
    return problems
