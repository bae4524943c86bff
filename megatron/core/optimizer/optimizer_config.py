"""Megatron's `OptimizerConfig`."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from megatron.core.base.lazy_imports import names_of_megatron

NOT_BUILT = {
    "apply_wd_to_qk_layernorm": False,
    "exp_avg_dtype": torch.float32,
    "exp_avg_sq_dtype": torch.float32,
    "fp8_recipe": None,
    "main_grads_dtype": torch.float32,
    "main_params_dtype": torch.float32,
    "optimizer_cpu_offload": False,
    "reuse_grad_buf_for_mxfp8_param_ag": False,
    "use_precision_aware_optimizer": False,
}


@dataclass
class OptimizerConfig:
    """Settings of the update and of the loss scale. The stage of ZeRO is that of the chunks."""

    lr: float | None = None
    min_lr: float | None = None
    decoupled_lr: float | None = None
    decoupled_min_lr: float | None = None
    weight_decay: float = 0.01
    apply_wd_to_qk_layernorm: bool = False
    fp8_recipe: str | None = None
    fp16: bool = False
    bf16: bool = False
    reuse_grad_buf_for_mxfp8_param_ag: bool = False
    params_dtype: torch.dtype = torch.float32
    use_precision_aware_optimizer: bool = False
    store_param_remainders: bool = True
    main_grads_dtype: torch.dtype = torch.float32
    main_params_dtype: torch.dtype = torch.float32
    exp_avg_dtype: torch.dtype = torch.float32
    exp_avg_sq_dtype: torch.dtype = torch.float32
    optimizer: str = "adam"
    loss_scale: float | None = None
    initial_loss_scale: float = 4294967296.0
    min_loss_scale: float = 1.0
    loss_scale_window: float = 1000
    hysteresis: int = 2
    adam_beta1: float = 0.9
    adam_beta2: float = 0.999
    adam_eps: float = 1e-08
    decoupled_weight_decay: bool = True
    sgd_momentum: float = 0.9
    muon_momentum: float = 0.95
    muon_split_qkv: bool = True
    muon_use_nesterov: bool = False
    muon_scale_mode: str = "spectral"
    muon_fp32_matmul_prec: str = "medium"
    muon_num_ns_steps: int = 5
    muon_tp_mode: str = "blockwise"
    muon_extra_scale_factor: float = 1.0
    use_distributed_optimizer: bool = False
    overlap_param_gather: bool = False
    overlap_param_gather_with_optimizer_step: bool = False
    optimizer_cpu_offload: bool = False
    optimizer_offload_fraction: float = 0.0
    use_torch_optimizer_for_cpu_offload: bool = False
    overlap_cpu_optimizer_d2h_h2d: bool = False
    pin_cpu_grads: bool = True
    pin_cpu_params: bool = True
    clip_grad: float = 1.0
    log_num_zeros_in_grad: bool = False
    barrier_with_L1_time: bool = False
    timers: Callable[..., Any] | None = None
    config_logger_dir: str = ""


__getattr__ = names_of_megatron(__name__)
