"""A layer of your own from core blocks: attention and MLP in parallel, on the same input.

    x -> x + scale * (attention(norm(x)) + mlp(norm(x)))

All sharding is inside the blocks, so the layer contains no parallel code. It has no parameters of its own. The model is a GPT of
such layers with one more head and loss. The head is replicated, `partial=False`: every tensor-parallel rank computes its whole
gradient.
"""

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.nn import functional

from megatron.core.base.dataclass_flags import ConfigError, option
from megatron.core.models.gpt.gpt_stage import GPTModel
from megatron.core.ops.attention.kv_cache import AttentionCache
from megatron.core.sharding.placement import Normal
from megatron.core.tensor_parallel import autograd_collectives
from megatron.core.tensor_parallel.cross_entropy import sharded_cross_entropy
from megatron.core.transformer.attention import ParallelAttention
from megatron.core.transformer.layer_parallel_context import LayerContext
from megatron.core.transformer.mlp import ParallelMLP
from megatron.core.transformer.model_config import ModelConfig
from megatron.core.transformer.norm import make_norm


@dataclass(frozen=True)
class SideBySideConfig:
    """Side by side."""

    branch_scale: float = option(
        1.0, "factor of attention and MLP before they are added to the residual stream", of_model=True
    )
    restart_weight: float = option(0.1, "weight of the auxiliary loss: does the next token start the phrase again?")

    def __post_init__(self) -> None:
        problems = []
        if not 0 < self.branch_scale <= 1:
            problems.append(f"--branch-scale is {self.branch_scale}; it must be above 0 and at most 1")
        if self.restart_weight < 0:
            problems.append(f"--restart-weight is {self.restart_weight}; it must not be negative")
        if problems:
            raise ConfigError(problems)


class SideBySideLayer(nn.Module):
    """forward(x [s, b, h] ([s/t, b, h] under sequence parallelism), mask, angles, cache) -> the same shape.

    The cache is for generation alone; the attention keeps its keys and values in it.
    """

    def __init__(self, config: ModelConfig, layer: int, context: LayerContext, *, own: SideBySideConfig):
        super().__init__()
        self.scale = own.branch_scale
        self.layernorm = make_norm(config, context)
        self.self_attention = ParallelAttention(config, layer, context)
        self.mlp = ParallelMLP(config, layer, context)
        self.dropout = context.hidden_dropout(config.hidden_dropout, "side by side", layer)

    def forward(
        self, x: Tensor, mask: Tensor | None = None, angles: Tensor | None = None, cache: AttentionCache | None = None
    ) -> Tensor:
        normed = self.layernorm(x)
        attention_out = self.self_attention(normed, mask, angles, cache)
        return x + self.dropout(self.scale * (attention_out + self.mlp(normed)))


class SideBySideModel(GPTModel):
    """One pipeline stage. forward(tokens, position_ids, labels=..., restarts=...) -> on the last stage (word losses, restart
    losses), both [b, s]; without labels the output of a GPT."""

    def __init__(self, config: ModelConfig, *, context: LayerContext, **parts: Any):
        super().__init__(config, context=context, **parts)
        tp = context.tp
        self.gathers = tp.sequence_parallel
        if self.language_model.post_process:
            self.restart_head = tp.replicated((config.hidden_size,), Normal(config.init_method_std), partial=False)

    def forward(
        self,
        tokens: Tensor | None,
        position_ids: Tensor | None,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        cache: AttentionCache | None = None,
        *,
        restarts: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        if labels is None or not self.language_model.post_process:
            return super().forward(tokens, position_ids, attention_mask, labels, cache)
        x = self.language_model(tokens, position_ids, attention_mask)  # [s, b, h], or [s/t, b, h]
        words = sharded_cross_entropy(self.language_model.logits(x), labels.t(), self.axis, self.vocab_size)
        whole = autograd_collectives.gather_replicated_sequence(x, self.axis) if self.gathers else x
        scores = whole.to(words.dtype) @ self.restart_head.to(words.dtype)  # [s, b]
        begins = functional.binary_cross_entropy_with_logits(scores, restarts.t().to(words.dtype), reduction="none")
        return words.t(), begins.t()
