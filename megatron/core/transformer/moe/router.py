"""The router of a mixture of experts: which experts a token visits, and the weights of their results.

    x [s, b, h] -> jitter -> logits [s, b, E] -> z-loss -> choice [s, b, K] -> weights -> capacity -> balancing losses, counts

The ranks of a sample hold other tokens of it. What decides is exactly equal on them, integers or gathered values, so a choice
does not depend on the layout.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron.core.base.lazy_imports import names_of_megatron
from megatron.core.distributed.sync_persistent_module_buffers import ChangesAtStepEnd
from megatron.core.ops.expert_load_interface import ReportsExpertLoads
from megatron.core.ops.layout_invariant_dropout import KeyedJitter
from megatron.core.ops.shard_sequence import positions_of
from megatron.core.parallel import collectives
from megatron.core.parallel.zigzag_sequence_row_ranges import SequenceShard
from megatron.core.sharding.buffer_placement_and_sync import BufferPlacement
from megatron.core.sharding.placement import Constant, Placement
from megatron.core.tensor_parallel import autograd_collectives
from megatron.core.transformer.layer_parallel_context import LayerContext
from megatron.core.transformer.model_config import ModelConfig
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.moe.moe_config import BALANCING_LOSSES, Z_LOSS

_DTYPES = {"fp32": torch.float32, "fp64": torch.float64}


class Routing(NamedTuple):
    """The experts of each token, in ascending order."""

    ids: Tensor  # int64 [s, b, K]
    weights: Tensor  # [s, b, K], in the router's dtype; 0 of a dropped choice
    kept: Tensor | None  # bool [s, b, K]; None: no choice is dropped


class ParallelRouter(ReportsExpertLoads, ChangesAtStepEnd):
    """forward(x [s, b, h], rows) -> `Routing`. rows: of each sample, those that x has. Every rank that has rows of the same
    samples must call.

    weight [E, h] is whole on every rank. Buffers: expert_bias [E], added to scores in the choice, with
    --moe-router-enable-expert-bias, constant while the weight is frozen; tokens_per_expert int64 [E], of the running step
    of training.
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

        self.expert_bias: Tensor | None
        zeros = torch.zeros(experts, dtype=torch.float32, device=tp.device)
        self.register_buffer("expert_bias", zeros if config.moe_router_enable_expert_bias else None)
        # integers, whose sums are equal in any layout, and so the signs by which the bias moves
        self.register_buffer("tokens_per_expert", torch.zeros(experts, dtype=torch.int64, device=tp.device))
        over_tp = Placement((experts,), None, replicated_over=("tp",), partial_grad=("tp",))
        self.buffer_placements = {"tokens_per_expert": BufferPlacement("sum", over_tp, restarts=True)}
        self.tokens_of_last_step: Tensor | None = None  # int64 [E], over all ranks
        self.idle_steps = torch.zeros(experts, dtype=torch.int64, device=tp.device)  # [E], since an expert had a token
        self.replay: Any = None  # a `RouteReplay`
        self.forget_counts()

        width = config.moe_input_jitter_eps or 0.0
        self.jitter = KeyedJitter(width, context.keys, "router jitter", layer, context.divided_rows)

    def forget_counts(self) -> None:
        """Begin the means of `mean_counts_so_far` anew."""
        zeros = torch.zeros(self.num_experts, dtype=torch.int64, device=self.context.tp.device)
        self.counts_so_far: tuple[Tensor, int] = zeros, 0  # [E], and the number of samples
        self.counts_before: dict[tuple[int, ...], tuple[Tensor, int]] = {}  # of each microbatch of the step

    def forward(self, x: Tensor, rows: SequenceShard) -> Routing:
        config = self.settings
        choices = self.context.keys.choices
        logits = self.gating(self.jitter(x, rows))
        ids = choices.of(lambda: self.choose(logits, rows))
        function, pre_softmax = config.router_weights
        weights = moe_utils.weights_of(
            logits, ids, function=function, pre_softmax=pre_softmax, scaling=config.moe_router_topk_scaling_factor
        )
        kept = None
        if config.capacity_factor is not None:
            kept = choices.of(lambda: self.within_capacity(ids, weights, rows))
            weights = weights * kept
        if self.training and torch.is_grad_enabled():
            self.balance(logits, rows)
            self.tokens_per_expert += moe_utils.count_tokens(ids, self.num_experts, kept).sum(0)
        return Routing(ids, weights, kept)

    def gating(self, x: Tensor) -> Tensor:
        """Return the logits of x [s, b, h]: [s, b, E], in the router's dtype."""
        dtype = _DTYPES.get(self.settings.moe_router_dtype, torch.promote_types(x.dtype, torch.float32))
        logits = x.to(dtype) @ self.weight.to(dtype).t()
        return logits if self.bias is None else logits + self.bias.to(dtype)

    @torch.no_grad()
    def choose(self, logits: Tensor, rows: SequenceShard) -> Tensor:
        """Return the experts of each token, ascending: int64 [s, b, K]. logits: [s, b, E]"""
        config = self.settings
        samples = self.context.keys.samples or tuple(range(logits.shape[1]))
        if self.replay is not None and (ids := self.replay.take(self.layer_number, samples)) is not None:
            return ids
        if config.balances_by_sinkhorn and self.training:
            ids = self.choose_by_sinkhorn(logits, rows)
        else:
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
            tokens = positions_of(rows, ids.shape[0], ids.device).unsqueeze(1).expand(ids.shape[:2])
            ids = moe_utils.experts_in_turn(tokens, self.topk, self.num_experts)
        ids = ids.sort(-1).values
        if self.replay is not None:
            self.replay.put(self.layer_number, samples, ids)
        return ids

    def choose_by_sinkhorn(self, logits: Tensor, rows: SequenceShard) -> Tensor:
        """Return the experts of each token that share all tokens of the microbatch about evenly: int64 [s, b, K].

        logits: [s, b, E]. Megatron balances the tokens of one rank, which is the same if it has the whole microbatch.
        """
        (whole,), positions = self.whole_samples([logits.detach()], rows)
        scores = moe_utils.sinkhorn(whole.flatten(0, 1)).view(whole.shape)
        return moe_utils.top_k(scores[positions], self.topk)

    def balance(self, logits: Tensor, rows: SequenceShard) -> None:
        """Add the z-loss and the balancing losses. logits: [s, b, E]"""
        config = self.settings
        losses = self.context.aux_losses
        tokens = rows.global_length(logits.shape[0])  # of a sample
        if config.moe_z_loss_coeff:
            total = self.sum_over_sample(moe_utils.z_losses(logits).sum(0), rows)  # [b]
            losses.add(Z_LOSS, self.layer_number, total / tokens, config.moe_z_loss_coeff)
        if not config.balancing_losses:
            return

        # the choice by scores alone: neither bias, nor groups, nor capacity
        choices = self.context.keys.choices
        counts = choices.of(lambda: self.counts_by_scores(logits, rows))  # [b, E]
        probabilities = moe_utils.probabilities_of(logits, config.moe_router_score_function)
        sums = self.sum_over_sample(probabilities.sum(0), rows)  # [b, E]
        for kind, coefficient in config.balancing_losses.items():
            unit_counts, unit_sums, unit_tokens = counts, sums, tokens  # of each sample: [b, E]
            if kind == "aux_loss":  # of the microbatch: [E]
                unit_counts, unit_sums, unit_tokens = counts.sum(0), sums.sum(0), tokens * logits.shape[1]
            elif kind == "global_aux_loss":
                unit_counts = choices.of(lambda: self.mean_counts_so_far(counts))
            value = moe_utils.balancing_loss(unit_counts.to(sums.dtype), unit_sums, unit_tokens, self.topk)  # [b] or []
            losses.add(BALANCING_LOSSES[kind], self.layer_number, value, coefficient)

    @torch.no_grad()
    def counts_by_scores(self, logits: Tensor, rows: SequenceShard) -> Tensor:
        """Return how many tokens of each whole sample have each expert among their K best: int64 [b, E]."""
        counts = moe_utils.count_tokens(moe_utils.top_k(logits, self.topk), self.num_experts)
        for axis in rows.axes:
            counts = collectives.all_reduce(counts, axis)
        return counts

    @torch.no_grad()
    def mean_counts_so_far(self, counts: Tensor) -> Tensor:
        """Return for each sample the mean of `counts` over the samples of the step up to it: float64 [b, E].

        Samples are counted as the step reads them: of microbatch j first those of data-parallel rank 0, then those of rank 1.
        Megatron takes means over microbatches, which depend on their size and on the number of ranks.
        """
        axis = self.context.samples
        samples = self.context.keys.samples
        is_new = not samples or samples not in self.counts_before  # a microbatch that runs again is not counted twice
        earlier, number = self.counts_so_far if is_new else self.counts_before[samples]
        everyone = collectives.all_gather(counts, axis)  # [ranks x b, E]
        sums = earlier + everyone.cumsum(0)
        numbers = number + torch.arange(1, len(sums) + 1, device=sums.device)
        if is_new:
            self.counts_before[samples] = earlier, number
            self.counts_so_far = sums[-1], number + len(sums)
        own = collectives.local_slice(len(sums), axis)
        return sums[own].double() / numbers[own].unsqueeze(-1)

    @torch.no_grad()
    def within_capacity(self, ids: Tensor, weights: Tensor, rows: SequenceShard) -> Tensor:
        """Return which choices the experts keep: bool [s, b, K]. Of each whole sample, by the capacity for it."""
        config = self.settings
        whole, positions = self.whole_samples([ids, weights], rows)
        capacity = moe_utils.get_capacity(len(whole[0]) * self.topk, self.num_experts, config.capacity_factor)
        return moe_utils.kept_tokens(*whole, self.num_experts, capacity, config.moe_token_drop_policy)[positions]

    @torch.no_grad()
    def whole_samples(self, parts: list[Tensor], rows: SequenceShard) -> tuple[list[Tensor], Tensor]:
        """Return (tensors of whole samples, in token order; the positions of this rank's rows [s]). parts: [s, ..] each."""
        positions = positions_of(rows, parts[0].shape[0], parts[0].device)
        gathered = [*parts, positions]
        for axis in rows.axes:
            gathered = [collectives.all_gather(x, axis) for x in gathered]
        order = gathered[-1].argsort()
        return [x[order] for x in gathered[:-1]], positions

    def sum_over_sample(self, x: Tensor, rows: SequenceShard) -> Tensor:
        """Return the sums of x, of any shape, over the ranks that routed other tokens of the same samples.

        The gradient of x is that of the result.
        """
        for axis in rows.axes:
            x = autograd_collectives.reduce(x, axis)
        return x

    def end_of_step(self) -> None:
        self.tokens_of_last_step = self.tokens_per_expert.clone()
        self.idle_steps = torch.where(self.tokens_per_expert > 0, 0, self.idle_steps + 1)
        if self.expert_bias is not None and self.weight.requires_grad:  # a frozen router chooses as before
            rate = self.settings.moe_router_bias_update_rate
            self.expert_bias.copy_(moe_utils.updated_expert_bias(self.expert_bias, self.tokens_per_expert, rate))
        self.tokens_per_expert.zero_()
        self.forget_counts()


__getattr__ = names_of_megatron(__name__)
