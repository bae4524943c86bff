"""The router of a mixture of experts: which experts a token visits, and the weights of their results.

    x [s, b, h] -> jitter -> logits [s, b, E] -> z-loss -> choice [s, b, K] -> weights -> capacity -> balancing losses, counts

All ranks of a sample hold other tokens of it. What decides is exactly equal on them: integers, or gathered values; so a choice does
not depend on the layout.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from megatron.core.distributed.buffer_sync import ChangesAtStepEnd
from megatron.core.ops.shard_sequence import positions_of
from megatron.core.parallel import collectives
from megatron.core.parallel.sequence_shard import SequenceShard
from megatron.core.sharding.module_buffer_placement import BufferPlacement
from megatron.core.sharding.placement import Constant, Placement
from megatron.core.tensor_parallel import autograd_collectives
from megatron.core.transformer.layer_build_context import LayerContext
from megatron.core.transformer.model_config import ModelConfig
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.moe.moe_config import BALANCING_LOSSES, Z_LOSS

_DTYPES = {"fp32": torch.float32, "fp64": torch.float64}


class Routing(NamedTuple):
    """The experts of each token, in ascending order."""

    ids: Tensor  # int64 [s, b, K]
    weights: Tensor  # [s, b, K], in the router's dtype; 0 of a dropped choice
    kept: Tensor | None  # bool [s, b, K]; None: no choice is dropped


class TopKRouter(ChangesAtStepEnd):
    """forward(x [s, b, h], rows) -> `Routing`. rows: of each sample, those that x has. Every rank of tp and cp must call.

    weight [E, h] is whole on every rank. Buffers: expert_bias [E], added to scores in the choice, with
    --moe-router-enable-expert-bias; tokens_per_expert int64 [E], of the running step of training.
    """

    def __init__(self, config: ModelConfig, layer: int, context: LayerContext):
        super().__init__()
        self.settings = config
        self.context = context
        self.layer_number = layer + 1  # auxiliary losses count layers from 1
        self.num_experts = experts = config.num_experts
        self.topk = config.moe_router_topk
        tp = context.tp

        # every rank of tp routes tokens of its own, so gradients are partial sums
        partial = tp.axis.size > 1
        self.weight = tp.replicated((experts, config.hidden_size), config.init, partial=partial)
        self.bias = None
        if config.moe_router_bias:
            self.bias = tp.replicated((experts,), Constant(0.0), partial=partial)

        # integers, whose sums are equal in any layout
        self.expert_bias: Tensor | None
        starts = torch.zeros(experts, dtype=torch.float32, device=tp.device)
        self.register_buffer("expert_bias", starts if config.moe_router_enable_expert_bias else None)
        self.register_buffer("tokens_per_expert", torch.zeros(experts, dtype=torch.int64, device=tp.device))
        over_tp = Placement((experts,), None, replicated_over=("tp",), partial_grad=("tp",))
        self.buffer_placements = {"tokens_per_expert": BufferPlacement("sum", over_tp)}
        self.tokens_of_last_step: Tensor | None = None  # int64 [E], over all ranks

    def forward(self, x: Tensor, rows: SequenceShard) -> Routing:
        config = self.settings
        logits = self.logits(x)
        if config.moe_z_loss_coeff:
            self.add_z_loss(logits, rows)
        ids = self.choose(logits)
        weights = moe_utils.weights_of(
            logits,
            ids,
            function=config.moe_router_score_function,
            pre_softmax=config.moe_router_pre_softmax,
            scaling=config.moe_router_topk_scaling_factor,
        )
        kept = None
        if config.capacity_factor is not None:
            kept = self.kept(ids, weights, rows)
            weights = weights * kept
        for kind, coefficient in config.balancing_losses.items():
            self.add_balancing_loss(kind, coefficient, logits, ids, rows)
        if self.training:
            self.tokens_per_expert += moe_utils.count_tokens(ids, self.num_experts, kept).sum(0)
        return Routing(ids, weights, kept)

    def logits(self, x: Tensor) -> Tensor:
        """Return the logits of x [s, b, h]: [s, b, E], in the router's dtype."""
        dtype = _DTYPES.get(self.settings.moe_router_dtype, torch.promote_types(x.dtype, torch.float32))
        logits = x.to(dtype) @ self.weight.to(dtype).t()
        return logits if self.bias is None else logits + self.bias.to(dtype)

    def choose(self, logits: Tensor) -> Tensor:
        """Return the experts of each token, ascending: int64 [s, b, K]. logits: [s, b, E]"""
        config = self.settings
        ids = moe_utils.choose_experts(
            logits,
            self.topk,
            function=config.moe_router_score_function,
            pre_softmax=config.moe_router_pre_softmax,
            expert_bias=self.expert_bias,
            groups=config.moe_router_num_groups,
            group_topk=config.moe_router_group_topk,
        )
        if config.moe_router_force_load_balancing:
            tokens = torch.arange(ids.shape[0] * ids.shape[1], device=ids.device).view(ids.shape[:2])
            ids = moe_utils.experts_in_turn(tokens, self.topk, self.num_experts)
        return ids.sort(-1).values

    def add_z_loss(self, logits: Tensor, rows: SequenceShard) -> None:
        """Add the z-loss: of each sample, the mean over its tokens."""
        total = self.sum_over_sample(moe_utils.z_losses(logits).sum(0), rows)  # [b]
        tokens = rows.global_length(logits.shape[0])
        self.context.aux_losses.add(Z_LOSS, self.layer_number, total / tokens, self.settings.moe_z_loss_coeff)

    def add_balancing_loss(
        self, kind: str, coefficient: float, logits: Tensor, ids: Tensor, rows: SequenceShard
    ) -> None:
        """Add a balancing loss, over the unit of its kind. logits: [s, b, E]; ids: [s, b, K]"""
        config = self.settings
        probabilities = moe_utils.probabilities_of(logits, config.moe_router_score_function)
        # the choice by probabilities alone: neither bias, nor groups, nor capacity
        own = moe_utils.top_k(logits, self.topk)
        counts = moe_utils.count_tokens(own, self.num_experts)  # [b, E]
        counts = self.sum_over_sample(counts, rows)
        sums = self.sum_over_sample(probabilities.sum(0), rows)  # [b, E]
        tokens = rows.global_length(logits.shape[0])
        if kind == "aux_loss":
            counts, sums, tokens = counts.sum(0), sums.sum(0), tokens * logits.shape[1]
        value = moe_utils.balancing_loss(counts.to(sums.dtype), sums, tokens, self.topk)  # [b], or [] of a microbatch
        self.context.aux_losses.add(BALANCING_LOSSES[kind], self.layer_number, value, coefficient)

    def kept(self, ids: Tensor, weights: Tensor, rows: SequenceShard) -> Tensor:
        """Return which choices the experts keep: bool [s, b, K]. Of each whole sample, by the capacity for it."""
        config = self.settings
        positions = positions_of(rows, ids.shape[0], ids.device)  # [s]
        gathered = [ids, weights.detach(), positions]
        for axis in (rows.sp, rows.cp):
            gathered = [collectives.all_gather(x, axis) for x in gathered]
        order = gathered[2].argsort()  # of the whole sample
        tokens = rows.global_length(ids.shape[0])
        capacity = moe_utils.capacity_of(tokens, self.topk, self.num_experts, config.capacity_factor)
        kept = moe_utils.kept_tokens(
            gathered[0][order], gathered[1][order], self.num_experts, capacity, config.moe_token_drop_policy
        )
        return kept[positions]

    def sum_over_sample(self, x: Tensor, rows: SequenceShard) -> Tensor:
        """Return the sums of x, of any shape, over the ranks that routed other tokens of the same samples.

        The gradient of x is that of the result.
        """
        return autograd_collectives.reduce(autograd_collectives.reduce(x, rows.sp), rows.cp)

    def end_of_step(self) -> None:
        self.tokens_of_last_step = self.tokens_per_expert.clone()
        if self.expert_bias is not None:
            rate = self.settings.moe_router_bias_update_rate
            self.expert_bias.copy_(moe_utils.updated_expert_bias(self.expert_bias, self.tokens_per_expert, rate))
        self.tokens_per_expert.zero_()
