"""The layer of a mixture of experts, in the place of a dense MLP.

    y = sum over the K experts e of x of w_e E_e(x) + S(x)        S: shared experts, if there are any

Every rank of a pipeline stage routes other tokens. Without sequence parallelism tensor-parallel ranks have equal tokens, so
each takes its part of them first.
"""

from dataclasses import replace

import torch
from torch import Tensor, nn

from megatron.core.base.lazy_imports import names_of_megatron
from megatron.core.ops.count_flops_by_module import Flops, LayerInput, flops_of, weight_flops
from megatron.core.parallel.zigzag_sequence_row_ranges import SequenceShard
from megatron.core.tensor_parallel import autograd_collectives
from megatron.core.transformer.layer_parallel_context import LayerContext
from megatron.core.transformer.mlp import ParallelMLP
from megatron.core.transformer.model_config import ModelConfig
from megatron.core.transformer.moe.experts import ParallelExperts
from megatron.core.transformer.moe.router import ParallelRouter
from megatron.core.transformer.moe.shared_experts import ParallelSharedExperts
from megatron.core.transformer.moe.token_dispatcher import DISPATCHERS
from megatron.core.transformer.recompute_without_rng_state import recompute_in_backward


class ParallelMoE(nn.Module):
    """forward(x [s, b, h] ([s/t, b, h] under sequence parallelism)) -> the same shape.

    Every rank of the pipeline stage's experts (ep_etp), and every rank that shares samples must call, forward and backward.
    """

    gives_hidden_states = True  # for --inspect
    recompute_module = "moe"  # its name in --recompute-modules; of an MLP without one it is mlp

    def __init__(self, config: ModelConfig, layer: int, context: LayerContext):
        super().__init__()
        self.settings = config
        self.context = context
        self.router = ParallelRouter(config, layer, context)
        self.experts = ParallelExperts(config, context)
        self.shared_experts = None
        if config.moe_shared_expert_intermediate_size is not None:
            self.shared_experts = ParallelSharedExperts(config, layer, context)

    def forward(self, x: Tensor) -> Tensor:
        config = self.settings
        tp = self.context.tp
        layer_input = x

        # this rank's tokens
        divides, rows = self.rows_of(x)
        if divides:
            x = autograd_collectives.scatter_sequence(x, tp.axis)  # [s/t, b, h]
        routing = self.router(x, rows)

        # to the experts, and back
        tokens, ids, weights = x.flatten(0, 1), routing.ids.flatten(0, 1), routing.weights.flatten(0, 1)  # [T, ..]
        kept = None if routing.kept is None else routing.kept.flatten(0, 1)
        if config.moe_apply_probs_on_input:
            tokens = tokens * weights.to(tokens.dtype)
            weights = torch.ones_like(weights)
        dispatcher = DISPATCHERS[config.moe_token_dispatcher_type](config.num_experts, self.context.experts)
        shared = None
        overlaps = self.shared_experts is not None and config.moe_shared_expert_overlap
        if overlaps and self.backward_ends_with_shared(tokens, weights):
            shared = self.shared(layer_input)
        dispatcher.start(tokens, ids, weights, kept)
        if overlaps and shared is None:
            shared = self.shared(layer_input)  # while rows travel
        y = dispatcher.finish(self.experts).view(x.shape)
        if divides:
            y = autograd_collectives.gather_replicated_sequence(y, tp.axis)
        if self.shared_experts is not None:
            if shared is None:
                shared = self.shared(layer_input)
            y = y + shared
        return y

    def rows_of(self, x: Tensor) -> tuple[bool, SequenceShard]:
        """Return (whether ranks of tp divide x among them, which rows of each sample this rank routes). x: [s, b, h]"""
        tp = self.context.tp
        divides = tp.axis.size > 1 and not tp.sequence_parallel
        if divides and x.shape[0] % tp.axis.size and not torch.is_grad_enabled():
            divides = False  # generation, of one token: every rank routes it
        return divides, self.context.divided_rows if divides else self.context.rows

    def backward_ends_with_shared(self, tokens: Tensor, weights: Tensor) -> bool:
        """Return whether a backward needs nothing of the experts: with them and all before them frozen, as adapters may.

        A recomputation of the layer ends once it has what the backward needs. That must not be while rows travel, because
        nobody would wait for them.
        """
        if not torch.is_grad_enabled() or tokens.requires_grad or weights.requires_grad:
            return False
        return not any(parameter.requires_grad for parameter in self.experts.parameters())

    def shared(self, x: Tensor) -> Tensor:
        """Return the result of the shared experts: x [s, b, h] ([s/t, b, h]) -> the same shape."""
        if self.settings.recomputes("shared_experts"):
            return recompute_in_backward(self.shared_experts, self.context.keys, x, modules=[self.shared_experts])
        return self.shared_experts(x)

    def count_flops(self, x: LayerInput) -> Flops:
        """Of each token the products with the router, with its K experts, whichever they are, and with the shared ones."""
        rows = replace(x, tokens=x.tokens * self.settings.moe_router_topk)
        flops = weight_flops(x, self.router.weight) + flops_of(self.experts, rows)
        recompute = self.settings.recomputes("shared_experts")
        return flops + flops_of(self.shared_experts, x, recompute=recompute)


def mlp_of_layer(config: ModelConfig, layer: int, context: LayerContext) -> nn.Module:
    """Return the MLP of a layer: a mixture of experts where --moe-layer-freq says so, else a dense one."""
    kind = ParallelMoE if config.is_moe_layer(layer) else ParallelMLP
    return kind(config, layer, context)


__getattr__ = names_of_megatron(__name__)
