"""A toy mixture of experts in the place of a layer's MLP: top-k routing without drops, over expert and tensor-parallel ranks.

    token x      p = softmax(R x), the experts are the k largest of p + bias
                 y = sum over them of w_e E_e(x), w = their p, divided by their sum; E_e(x) = W2_e gelu(W1_e x)

    rows of (token, expert) -> the ranks of the expert -> products -> back -> weighted sums

The bias is a buffer that balances the experts without a gradient (arXiv:2408.15664): at the end of a step it grows for the
experts that had fewer tokens than the mean. The auxiliary loss is that of Switch Transformer (arXiv:2101.03961), a sample
at a time.

Every rank of a pipeline stage routes other tokens. Without sequence parallelism tensor-parallel ranks have equal tokens,
so each takes its part of them first.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional

from megatron.core.base.dataclass_flags import option
from megatron.core.distributed.sync_persistent_module_buffers import ChangesAtStepEnd
from megatron.core.models.gpt.gpt_stage import GPTModel
from megatron.core.ops.count_flops_by_module import Flops, LayerInput, weight_flops
from megatron.core.ops.decisions_overridable_for_memory_prediction import row_counts
from megatron.core.parallel import collectives
from megatron.core.parallel.rank_grid import EXPERT_DATA_PARALLEL
from megatron.core.sharding.buffer_placement_and_sync import BufferPlacement
from megatron.core.sharding.placement import Normal, Placement
from megatron.core.tensor_parallel import autograd_collectives
from megatron.core.transformer.layer_parallel_context import ExpertParallel, LayerContext
from megatron.core.transformer.model_config import ModelConfig
from megatron.core.transformer.spec_utils import ContextSpec, ModuleSpec
from megatron.core.transformer.transformer_layer import TransformerLayer, submodules_of


@dataclass(frozen=True)
class ToyMoEConfig:
    """experts of the toy"""

    toy_experts: int = option(8, "experts of each layer")
    toy_topk: int = option(2, "experts of each token")
    toy_expert_width: int = option(32, "hidden features of each expert")
    toy_balance_coefficient: float = option(1e-2, "coefficient of the balancing loss")
    toy_bias_update_rate: float = option(1e-3, "change of an expert's bias in a step")
    toy_force_balance: bool = option(False, "choose experts in turn, whatever the router says")


class ToyMoE(ChangesAtStepEnd):
    """forward: x [s, b, h] ([s/t, b, h] under sequence parallelism) -> the same shape"""

    def __init__(self, config: ModelConfig, layer: int, context: LayerContext, own: ToyMoEConfig):
        super().__init__()
        self.own = own
        self.context = context
        self.layer_number = layer + 1  # auxiliary losses count layers from 1
        tp, ranks = context.tp, context.experts
        self.divides_tokens = tp.axis.size > 1 and not tp.sequence_parallel

        # every rank of tp routes tokens of its own, so the router's gradients are partial sums
        experts, width, h = own.toy_experts, own.toy_expert_width, config.hidden_size
        init = Normal(config.init_method_std)
        self.router = tp.replicated((experts, h), init, partial=tp.axis.size > 1)

        # an expert is on the ranks of one position of ep; each rank of etp has a part of its hidden features
        of_experts = {"reduce_over": EXPERT_DATA_PARALLEL}
        fc1 = Placement((experts, width, h), init, shard={"ep": 0, "etp": 1}, **of_experts)
        fc2 = Placement((experts, h, width), init, shard={"ep": 0, "etp": 2}, **of_experts)
        here, part = experts // ranks.ep.size, width // ranks.etp.size
        self.fc1 = tp.parameter((here, part, h), fc1, (ranks.ep, ranks.etp))
        self.fc2 = tp.parameter((here, h, part), fc2, (ranks.ep, ranks.etp))

        # integers, whose sums are equal in any layout
        self.register_buffer("expert_bias", torch.zeros(experts, device=tp.device))
        self.register_buffer("tokens_per_expert", torch.zeros(experts, dtype=torch.int64, device=tp.device))
        over_tp = Placement((experts,), None, replicated_over=("tp",), partial_grad=("tp",))
        self.buffer_placements = {"tokens_per_expert": BufferPlacement("sum", over_tp, restarts=True)}

    def forward(self, x: Tensor) -> Tensor:
        axis = self.context.tp.axis
        if self.divides_tokens:
            x = autograd_collectives.scatter_sequence(x, axis)  # [s/t, b, h]
        ids, weights = self.route(x)
        tokens, ids, weights = x.flatten(0, 1), ids.flatten(0, 1), weights.flatten(0, 1)  # [T, ..]
        rows = through_experts(tokens, ids, self.own.toy_experts, self.context.experts, self.products)  # [T, k, h]
        y = (weights.unsqueeze(-1).to(rows.dtype) * rows).sum(1).view(x.shape)
        if self.divides_tokens:
            y = autograd_collectives.gather_replicated_sequence(y, axis)
        return y

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the experts of each token, in ascending order, and their weights: [s, b, k] each."""
        k, experts = self.own.toy_topk, self.own.toy_experts
        wide = torch.promote_types(x.dtype, torch.float32)
        chances = (x.to(wide) @ self.router.to(wide).t()).softmax(-1)  # [s, b, experts]
        scores = chances.detach() + self.expert_bias
        # a stable sort: of equal scores the first expert, in any layout
        ids = scores.sort(dim=-1, descending=True, stable=True).indices[..., :k].sort(-1).values
        if self.own.toy_force_balance:
            turns = torch.arange(x.shape[0] * x.shape[1] * k, device=x.device) % experts
            ids = turns.view(*x.shape[:2], k)
        chosen = chances.gather(-1, ids)
        self.balance(chances, ids)
        return ids, chosen / chosen.sum(-1, keepdim=True)

    def balance(self, chances: Tensor, ids: Tensor) -> None:
        """Count the tokens of each expert, and add the balancing loss. chances: [s, b, experts], ids: [s, b, k]"""
        experts, k = self.own.toy_experts, self.own.toy_topk
        is_chosen = (ids.unsqueeze(-1) == torch.arange(experts, device=ids.device)).sum(2)  # [s, b, experts]
        counts = is_chosen.sum(0)  # [b, experts]
        if self.training:
            self.tokens_per_expert += counts.sum(0)
        counts = self.sum_over_sample(counts.to(chances.dtype))
        sums = self.sum_over_sample(chances.sum(0))  # [b, experts]
        tokens = counts.sum(-1) / k  # [b]
        value = experts / k * (counts * sums).sum(-1) / tokens.square()  # [b]
        self.context.aux_losses.add("load balance", self.layer_number, value, self.own.toy_balance_coefficient)

    def sum_over_sample(self, x: Tensor) -> Tensor:
        """Return the sums over the ranks that routed other tokens of the same samples. x: any shape -> the same"""
        x = self.context.sum_over_sample(x)
        return autograd_collectives.reduce(x, self.context.tp.axis) if self.divides_tokens else x

    def products(self, rows: Sequence[Tensor]) -> list[Tensor]:
        """Return what this rank's experts make of their rows, [rows, h] each. No rows are a product, too: it has a gradient."""
        weights = zip(rows, self.fc1.unbind(), self.fc2.unbind(), strict=True)
        return [functional.gelu(x @ fc1.t()) @ fc2.t() for x, fc1, fc2 in weights]

    def count_flops(self, x: LayerInput) -> Flops:
        """Of each token the products with the router and with k experts, whichever they are."""
        rows = replace(x, tokens=x.tokens * self.own.toy_topk)
        h = self.router.placement.shape[1]
        flops = weight_flops(x, self.router)
        for weight in (self.fc1, self.fc2):
            flops += weight_flops(rows, weight, per_token=h * self.own.toy_expert_width)
        return flops

    def end_of_step(self) -> None:
        counts = self.tokens_per_expert.double()  # of all ranks
        self.expert_bias += self.own.toy_bias_update_rate * (counts.mean() - counts).sign().to(self.expert_bias.dtype)
        self.tokens_per_expert.zero_()


def through_experts(
    tokens: Tensor,
    ids: Tensor,
    num_experts: int,
    ranks: ExpertParallel,
    products: Callable[[Sequence[Tensor]], list[Tensor]],
) -> Tensor:
    """Send each token to its experts, and return what they make of it: tokens [T, h], ids [T, k] -> [T, k, h].

    products: rows of each expert of this rank -> the results, or this rank's terms of them. Every rank of ep_etp must call,
    forward and backward, also one without tokens.
    """
    everyone, parts = ranks.ep_etp, ranks.etp.size
    local = num_experts // ranks.ep.size  # experts of a rank
    k = ids.shape[1]
    flat = ids.flatten()
    order = flat.argsort(stable=True)  # rows by expert, then by token

    # how many rows go where; each goes to all ranks that have a part of its expert
    counts = (flat.unsqueeze(-1) == torch.arange(num_experts, device=flat.device)).sum(0).view(-1, local)  # [ep, local]
    arriving = collectives.all_to_all(counts.repeat_interleave(parts, 0), everyone)  # [ranks, local]
    sent = [n for n in row_counts(counts.sum(1), flat.numel()) for _ in range(parts)]
    received = row_counts(arriving, flat.numel() * parts)  # [ranks][local]
    received_of_rank = [sum(of_rank) for of_rank in received]

    # to the experts
    rows = tokens[order // k]  # [T k, h]
    rows = torch.cat([part for part in rows.split(sent[::parts]) for _ in range(parts)])
    arrived = autograd_collectives.all_to_all_v(rows, everyone, sent, received_of_rank)
    pieces = arrived.split([n for of_rank in received for n in of_rank])
    results = products([torch.cat(pieces[expert::local]) for expert in range(local)])

    # and back
    by_expert = [result.split([of_rank[i] for of_rank in received]) for i, result in enumerate(results)]
    results = torch.cat([by_expert[i][rank] for rank in range(everyone.size) for i in range(local)])
    terms = autograd_collectives.all_to_all_v(results, everyone, received_of_rank, sent).split(sent)
    rows = torch.cat([sum(terms[i + 1 : i + parts], terms[i]) for i in range(0, len(terms), parts)])  # [T k, h]
    return rows[order.argsort()].view(*ids.shape, -1)


class ToyMoEModel(GPTModel):
    """A GPT with experts in every layer."""


def spec_of(config: ModelConfig, own: ToyMoEConfig) -> ModuleSpec:
    """Return a layer with experts in the place of its MLP."""
    parts = submodules_of(config)
    parts.mlp = ContextSpec(lambda config, layer, context: ToyMoE(config, layer, context, own))
    return ModuleSpec(TransformerLayer, submodules=parts)
