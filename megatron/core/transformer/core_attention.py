"""Attention without its parameters: the heads' layout and precision around a kernel."""

from torch import Tensor, nn

from megatron.core.random import AttentionDropout
from megatron.core.transformer.context import LayerContext
from megatron.core.transformer.kernels import AttentionCase, Documents, Mask, kernel_for
from megatron.core.transformer.transformer_config import TransformerConfig

__all__ = ["CoreAttention", "Documents"]


class CoreAttention(nn.Module):
    """forward(q [s, b, n, d], k, v [s, b, groups, d], mask) -> [s, b, n * d] of this rank's heads, causal when the mask is None."""

    def __init__(self, config: TransformerConfig, layer: int, context: LayerContext):
        super().__init__()
        first_head = context.tp.axis.rank * config.num_attention_heads // context.tp.axis.size
        self.dropout = AttentionDropout(config.attention_dropout, context.keys, layer, first_head)
        self.backend, self.way = config.attention_backend, context.tp.products.attention

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask = None) -> Tensor:
        dtype = q.dtype
        if self.way == "widened":  # computed in float32, and rounded once
            q, k, v = q.float(), k.float(), v.float()
        q, k, v = (x.permute(1, 2, 0, 3) for x in (q, k, v))  # [b, n, s, d]
        case = AttentionCase(q, k, mask, self.dropout.probability if self.training else 0.0)
        out = kernel_for(self.backend, case).compute(q, k, v, mask, self.dropout)
        return out.permute(2, 0, 1, 3).flatten(2).to(dtype)  # [s, b, n * d]
