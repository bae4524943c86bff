"""Megatron's `ModelParallelConfig` (Megatron: core/model_parallel_config.py)."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from megatron.core.base.lazy_imports import names_of_megatron


@dataclass
class ModelParallelConfig:
    """The options of parallelism, of communication and of dtypes, with Megatron's names and defaults."""

    tensor_model_parallel_size: int = 1
    pipeline_model_parallel_comm_backend: str | None = None
    pipeline_model_parallel_size: int = 1
    virtual_pipeline_model_parallel_size: int | None = None
    sequence_parallel: bool = False
    context_parallel_size: int = 1
    hierarchical_context_parallel_sizes: list[int] | None = None
    max_seqlen_per_dp_cp_rank: int | None = None
    hybrid_context_parallel: bool = False
    expert_model_parallel_size: int = 1
    expert_tensor_parallel_size: int | None = None
    moe_extended_tp: bool = False
    perform_initialization: bool = True
    use_cpu_initialization: bool = False
    fp16: bool = False
    bf16: bool = False
    params_dtype: torch.dtype = torch.float32
    timers: Callable[..., Any] | None = None
    finalize_model_grads_func: Callable[..., Any] | None = None
    grad_scale_func: Callable[..., Any] | None = None
    no_sync_func: Callable[..., Any] | None = None
    grad_sync_func: Callable[..., Any] | None = None
    param_sync_func: Callable[..., Any] | None = None
    deterministic_mode: bool = False
    enable_autocast: bool = False
    autocast_dtype: torch.dtype | None = None
    num_microbatches_with_partial_activation_checkpoints: int | None = None
    gradient_accumulation_fusion: bool = False
    async_tensor_model_parallel_allreduce: bool = False
    use_te_rng_tracker: bool = False
    tp_comm_overlap: bool = False
    tp_comm_bulk_wgrad: bool = True
    tp_comm_bulk_dgrad: bool = True
    tp_comm_overlap_ag: bool = True
    tp_comm_overlap_rs: bool = True
    tp_comm_overlap_rs_dgrad: bool = False
    tp_comm_split_ag: bool = True
    tp_comm_atomic_ag: bool = False
    tp_comm_split_rs: bool = True
    tp_comm_atomic_rs: bool = False
    cross_entropy_loss_fusion: bool = False
    cross_entropy_fusion_impl: str = "native"
    tp_comm_overlap_disable_qkv: bool = False
    tp_comm_overlap_disable_fc1: bool = False
    tp_comm_bootstrap_backend: str = "nccl"
    overlap_moe_expert_parallel_comm: bool = False
    delay_wgrad_compute: bool = False
    ep_overlap_early_attn_memory_release: bool = False
    pipeline_dtype: torch.dtype | None = None
    variable_seq_lengths: bool = False
    overlap_p2p_comm: bool = False
    batch_p2p_comm: bool = True
    batch_p2p_sync: bool = True
    use_ring_exchange_p2p: bool = False
    deallocate_pipeline_outputs: bool = False
    defer_embedding_wgrad_compute: bool = False
    wgrad_deferral_limit: int = 0
    overlap_p2p_comm_warmup_flush: bool = False
    microbatch_group_size_per_vp_stage: int | None = None
    mtp_standalone: bool = False
    cpu_offloading: bool = False
    cpu_offloading_num_layers: int = 0
    cpu_offloading_activations: bool = True
    cpu_offloading_weights: bool = True
    cpu_offloading_double_buffering: bool = False
    barrier_with_L1_time: bool = True
    pipeline_model_parallel_split_rank: int | None = None


__getattr__ = names_of_megatron(__name__)
