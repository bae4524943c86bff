"""Small models with experts, and what trains them: the subject of the tests of experts in layouts."""

from dataclasses import replace
from typing import Any

import torch
from tiny_run import GPT, SEQ, TINY_GPT2, TINY_LLAMA, Texts, sample
from torch import Tensor

from megatron.core.distributed.data_parallel_config import DataParallelConfig

BATCH = 8


def unmasked(number: int, texts: Texts | None = None) -> dict[str, Tensor]:
    return sample(number, texts or Texts()) | {"mask": torch.ones(SEQ, dtype=torch.float64)}


SUBJECT = replace(GPT, sample=unmasked, tokens=SEQ)
GPT2 = replace(TINY_GPT2, num_experts=8, moe_ffn_hidden_size=12)
LLAMA = replace(TINY_LLAMA, num_experts=8, moe_ffn_hidden_size=12)
# Routers whose choices, losses and biases differ.
ROUTERS: dict[str, dict[str, Any]] = {
    "softmax": {
        "moe_aux_loss_coeff": [0.3],
        "moe_router_load_balancing_type": ["seq_aux_loss"],
        "moe_z_loss_coeff": 0.01,
    },
    "bias": {
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_bias_update_rate": 2e-4,
        "moe_router_num_groups": 4,
        "moe_router_group_topk": 3,
        "moe_router_topk_scaling_factor": 2.5,
        "moe_router_topk": 4,
        "moe_shared_expert_intermediate_size": 8,
        "moe_shared_expert_gate": True,
        "moe_layer_freq": "[0,1,1,0]",
        "moe_token_dispatcher_type": "alltoall",
        "moe_shared_expert_overlap": True,
    },
    "capacity": {
        "moe_router_score_function": "sigmoid",
        "moe_expert_capacity_factor": 0.75,
        "moe_router_load_balancing_type": ["global_aux_loss"],
        "moe_aux_loss_coeff": [0.3],
        "moe_input_jitter_eps": 0.1,
        "moe_token_dispatcher_type": "alltoall",
    },
}


def zero(stage: int, **options: Any) -> DataParallelConfig:
    return DataParallelConfig(zero_stage=stage, overlap_grad_reduce=stage > 0, ddp_bucket_size=1500, **options)
