"""Shared experts: a dense MLP that every token visits besides its experts, with or without a gate."""

from dataclasses import replace

from torch import Tensor

from megatron.core.base.lazy_imports import names_of_megatron
from megatron.core.ops.count_flops_by_module import Flops, LayerInput, weight_flops
from megatron.core.transformer.layer_parallel_context import LayerContext
from megatron.core.transformer.mlp import ParallelMLP
from megatron.core.transformer.model_config import ModelConfig


class ParallelSharedExperts(ParallelMLP):
    """MLP(x), with --moe-shared-expert-gate times sigmoid(w x). w: gate_weight [1, h].

    All shared experts are one MLP, whose hidden size is their total. forward: as `ParallelMLP`.
    """

    def __init__(self, config: ModelConfig, layer: int, context: LayerContext):
        width = config.moe_shared_expert_intermediate_size
        super().__init__(replace(config, ffn_hidden_size=width), layer, context)
        self.gate_weight = None
        if config.moe_shared_expert_gate:
            self.gate_weight = context.tp.replicated((1, config.hidden_size), config.init)

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y if self.gate_weight is None else y * (x @ self.gate_weight.t()).sigmoid()

    def count_flops(self, x: LayerInput) -> Flops:
        flops = super().count_flops(x)
        return flops if self.gate_weight is None else flops + weight_flops(x, self.gate_weight)


__getattr__ = names_of_megatron(__name__)
