"""Megatron's `TransformerConfig`, and the conversion to our `ModelConfig`."""

from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch.nn import functional

from megatron.core.base.dataclass_flags import ConfigError
from megatron.core.base.from_megatron_config import problems_of_not_built
from megatron.core.base.lazy_imports import names_of_megatron
from megatron.core.model_parallel_config import ModelParallelConfig
from megatron.core.transformer.enums import AttnBackend
from megatron.core.transformer.model_config import ModelConfig
from megatron.core.utils import init_method_normal, scaled_init_method_normal

# Fields that would change the numbers and are not built here -> the only value that is accepted.
NOT_BUILT = {
    "activation_func_clamp_value": None,
    "apply_residual_connection_post_layernorm": False,
    "attention_output_gate": False,
    "context_parallel_size": 1,
    "embedding_init_method": None,
    "embedding_init_method_std": None,
    "experimental_attention_variant": None,
    "first_last_layers_bf16": False,
    "fp4": None,
    "fp8": None,
    "glu_linear_offset": 0.0,
    "heterogeneous_block_specs": False,
    "layernorm_zero_centered_gamma": False,
    "linear_attention_freq": None,
    "mtp_num_layers": None,
    "multi_latent_attention": False,
    "no_rope_freq": None,
    "qk_clip": False,
    "qk_l2_norm": False,
    "rotary_interleaved": False,
    "softmax_scale": None,
    "softmax_type": "vanilla",
    "variable_seq_lengths": False,
}


@dataclass
class TransformerConfig(ModelParallelConfig):
    """A model's settings by Megatron's names.

    Fields that are built nowhere here are refused once a model is made of them.
    """

    num_layers: int = 0
    mtp_num_layers: int | None = None
    mtp_loss_scaling_factor: float | None = 0.1
    num_layers_in_first_pipeline_stage: int | None = None
    num_layers_in_last_pipeline_stage: int | None = None
    pipeline_model_parallel_layout: str | list[list[str]] | None = None
    account_for_embedding_in_pipeline_split: bool = False
    account_for_loss_in_pipeline_split: bool = False
    hidden_size: int = 0
    num_attention_heads: int = 0
    attention_backend: str | AttnBackend = "auto"
    softmax_scale: float | None = None
    softmax_type: str = "vanilla"
    num_query_groups: int | None = None
    ffn_hidden_size: int | None = None
    kv_channels: int | None = None
    hidden_dropout: float = 0.1
    attention_dropout: float = 0.1
    fp32_residual_connection: bool = False
    apply_residual_connection_post_layernorm: bool = False
    layernorm_epsilon: float = 1e-05
    layernorm_zero_centered_gamma: bool = False
    add_bias_linear: bool = True
    add_qkv_bias: bool = False
    gated_linear_unit: bool = False
    activation_func: Callable[..., Any] = functional.gelu
    activation_func_fp8_input_store: bool = False
    glu_linear_offset: float = 0.0
    activation_func_clamp_value: float | None = None
    num_moe_experts: int | None = None
    rotary_interleaved: bool = False
    window_size: tuple[int, int] | None = None
    window_attn_skip_freq: int | list[int] | None = None
    normalization: str = "LayerNorm"
    qk_layernorm: bool = False
    qk_l2_norm: bool = False
    qk_clip: bool = False
    qk_clip_alpha: float = 0.5
    qk_clip_threshold: float = 100
    log_max_attention_logit: bool = False
    attention_output_gate: bool = False
    test_mode: bool = False
    calculate_per_token_loss: bool = False
    multi_latent_attention: bool = False
    no_rope_freq: int | list[int] | None = None
    experimental_attention_variant: str | None = None
    dsa_indexer_n_heads: int | None = None
    dsa_indexer_head_dim: int | None = None
    dsa_indexer_topk: int | None = None
    dsa_indexer_loss_coeff: float | None = None
    dsa_indexer_use_sparse_loss: bool = False
    linear_attention_freq: int | list[int] | None = None
    linear_conv_kernel_dim: int | None = 4
    linear_key_head_dim: int | None = 128
    linear_value_head_dim: int | None = 128
    linear_num_key_heads: int | None = 16
    linear_num_value_heads: int | None = 32
    init_method: Callable[..., Any] | None = None
    output_layer_init_method: Callable[..., Any] | None = None
    init_method_std: float = 0.02
    embedding_init_method: Callable[..., Any] | None = None
    embedding_init_method_std: float | None = None
    init_model_with_meta_device: bool = False
    apply_query_key_layer_scaling: bool = False
    attention_softmax_in_fp32: bool = True
    disable_bf16_reduced_precision_matmul: bool = False
    bias_activation_fusion: bool = False
    masked_softmax_fusion: bool = False
    persist_layer_norm: bool = False
    memory_efficient_layer_norm: bool = False
    bias_dropout_fusion: bool = False
    apply_rope_fusion: bool = False
    use_fused_weighted_squared_relu: bool = False
    fused_single_qkv_rope: bool = False
    recompute_granularity: str | None = None
    recompute_method: str | None = None
    recompute_num_layers: int | None = None
    distribute_saved_activations: bool | None = None
    recompute_modules: list[str] | None = None
    fp8: str | None = None
    fp8_recipe: str | None = "delayed"
    fp8_param: bool = False
    fp8_quantizer_factory: str | None = None
    fp8_margin: int = 0
    fp8_interval: int = 1
    fp8_amax_history_len: int = 1
    fp8_amax_compute_algo: str = "most_recent"
    fp8_wgrad: bool = True
    fp8_dot_product_attention: bool = False
    fp8_multi_head_attention: bool = False
    tp_only_amax_red: bool = False
    first_last_layers_bf16: bool = False
    num_layers_at_start_in_bf16: int = 1
    num_layers_at_end_in_bf16: int = 1
    use_kitchen: bool = False
    use_kitchen_attention: bool = False
    kitchen_attention_backend: str = "sdpa"
    fp4: str | None = None
    fp4_recipe: str | None = "nvfp4"
    fp4_param: bool = False
    fp4_quantizer_factory: str | None = None
    moe_shared_expert_intermediate_size: int | None = None
    moe_shared_expert_gate: bool = False
    moe_shared_expert_overlap: bool = False
    moe_layer_freq: int | list[int] = 1
    moe_ffn_hidden_size: int | None = None
    moe_router_load_balancing_type: str | list[str] = "aux_loss"
    moe_router_topk: int = 2
    moe_enable_routing_replay: bool = False
    moe_router_topk_limited_devices: int | None = None
    moe_router_padding_for_quantization: bool | None = False
    moe_router_padding_for_fp8: bool | None = False
    moe_router_num_groups: int | None = None
    moe_router_group_topk: int | None = None
    moe_router_pre_softmax: bool = False
    moe_router_topk_scaling_factor: float | None = None
    moe_router_score_function: str = "softmax"
    moe_router_dtype: str | None = None
    moe_router_enable_expert_bias: bool = False
    moe_router_bias_update_rate: float = 0.001
    moe_router_force_load_balancing: bool = False
    moe_grouped_gemm: bool = False
    moe_use_legacy_grouped_gemm: bool = False
    moe_aux_loss_coeff: float | list[float] = 0
    moe_z_loss_coeff: float | None = None
    moe_input_jitter_eps: float | None = None
    moe_token_dropping: bool = False
    moe_token_dispatcher_type: str = "allgather"
    moe_enable_deepep: bool = False
    moe_flex_dispatcher_backend: str = "deepep"
    moe_per_layer_logging: bool = False
    moe_expert_capacity_factor: float | None = None
    moe_pad_expert_input_to_capacity: bool = False
    moe_token_drop_policy: str = "probs"
    moe_layer_recompute: bool = False
    moe_permute_fusion: bool = False
    moe_router_fusion: bool = False
    moe_apply_probs_on_input: bool = False
    moe_latent_size: int | None = None
    moe_deepep_num_sms: int = 20
    moe_hybridep_num_sms: int = 16
    cp_comm_type: str | list[str] | None = None
    enable_cuda_graph: bool = False
    cuda_graph_use_single_mempool: bool = False
    cuda_graph_retain_backward_graph: bool = False
    cuda_graph_warmup_steps: int = 3
    external_cuda_graph: bool = False
    cuda_graph_impl: str = "none"
    cuda_graph_scope: str | list[str] = "full"
    clone_scatter_output_in_embedding: bool = True
    disable_parameter_transpose_cache: bool = False
    config_logger_dir: str = ""
    flash_decode: bool = False
    batch_invariant_mode: bool = False
    use_te_activation_func: bool = False
    use_grouped_gemm_for_dense_mlp: bool = False
    inference_rng_tracker: bool = False
    inference_sampling_seed: int = 42
    symmetric_ar_type: str | None = None
    use_inference_optimized_layers: bool = False
    inference_fuse_tp_communication: bool = False
    mrope_section: list[int] | None = None
    is_hybrid_model: bool = False
    mamba_state_dim: int = 128
    mamba_head_dim: int = 64
    mamba_num_groups: int = 8
    mamba_num_heads: int | None = None
    use_mamba_mem_eff_path: bool = True
    mlp_chunks_for_prefill: int = 1
    heterogeneous_block_specs: bool = False
    hetereogenous_dist_checkpoint: bool = False
    quant_recipe: Any = None
    transformer_impl: str = "transformer_engine"
    fine_grained_activation_offloading: bool = False
    offload_modules: list[str] | None = field(default_factory=list)
    min_offloaded_tensor_size: int = 1048576

    def __post_init__(self) -> None:
        self.ffn_hidden_size = self.ffn_hidden_size or 4 * self.hidden_size
        self.num_query_groups = self.num_query_groups or self.num_attention_heads
        self.kv_channels = self.kv_channels or self.hidden_size // max(1, self.num_attention_heads)
        self.init_method = self.init_method or init_method_normal(self.init_method_std)
        scaled = scaled_init_method_normal(self.init_method_std, max(1, self.num_layers))
        self.output_layer_init_method = self.output_layer_init_method or scaled


def model_config(config: Any, base: ModelConfig | None = None, **options: Any) -> ModelConfig:
    """Return the ModelConfig of a TransformerConfig, from which our layers are built.

    base: the run's ModelConfig, for fields that Megatron's config lacks. options: further fields, from a model's own
    arguments. Raises ConfigError for what is not built.
    """
    if isinstance(config, ModelConfig):
        return replace(config, **options)
    if problems := _problems(config):
        raise ConfigError(problems)

    # fields of the same name
    megatron_fields = {field.name for field in fields(TransformerConfig)}
    values = {field.name: getattr(config, field.name) for field in fields(ModelConfig) if field.name in megatron_fields}
    for name in ("recompute_modules", "distribute_saved_activations"):  # Megatron's None means our default
        if values[name] is None:
            del values[name]

    # fields of other names or types
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
        "num_experts": config.num_moe_experts,
        "moe_layer_freq": str(config.moe_layer_freq).replace(" ", ""),
        "moe_router_load_balancing_type": _as_list(config.moe_router_load_balancing_type),
        "moe_aux_loss_coeff": _as_list(config.moe_aux_loss_coeff),
        "attention_backend": getattr(config.attention_backend, "name", config.attention_backend),
    }
    return replace(base or ModelConfig(), **{**values, **options})


def _as_list(value: Any) -> list:
    return list(value) if isinstance(value, list | tuple) else [value]


def _problems(config: Any) -> list[str]:
    """Return why our layers cannot compute what a config says."""
    problems = problems_of_not_built(config, NOT_BUILT)
    built_activation = functional.silu if config.gated_linear_unit else functional.gelu
    if config.activation_func is not built_activation:
        name = getattr(config.activation_func, "__name__", config.activation_func)
        problems.append(
            f"TransformerConfig: activation_func {name} with gated_linear_unit={config.gated_linear_unit} is not built yet; use "
            "torch.nn.functional.gelu, or silu with gated_linear_unit=True"
        )
    return problems


__getattr__ = names_of_megatron(__name__)
