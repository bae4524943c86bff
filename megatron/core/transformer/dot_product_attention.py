"""Attention between projected heads: ours, `CoreAttention`, and Megatron's `DotProductAttention` over it."""

from typing import Any

from torch import Tensor, nn

from megatron.core.context_parallel.cp_attention import SharedAttention
from megatron.core.ops.attention.kernels import AttentionCase, Scoring, kernel_for
from megatron.core.ops.attention.masks import Biased, Mask
from megatron.core.ops.compile.compiled_region import compiles
from megatron.core.ops.dropout import AttentionDropout
from megatron.core.parallel.grid import ALONE
from megatron.core.sharding.placement import Normal, Placement
from megatron.core.tensor_parallel.linear_layers import size_per_rank
from megatron.core.transformer.layer_build_context import LayerContext
from megatron.core.transformer.model_config import ModelConfig
from megatron.core.transformer.module import context_of, settings_of


class CoreAttention(nn.Module):
    """forward(q [s, b, n, d], k, v [s, b, groups, d], mask) -> [s, b, n d] of this rank's heads; a mask of None is causal.

    is_whole: every rank has these samples whole, whatever the context says."""

    def __init__(self, config: ModelConfig, layer: int, context: LayerContext):
        super().__init__()
        self.cp, self.method = context.cp, context.cp.method_of(layer)
        # Of the ranks that share the heads of a tensor-parallel rank.
        self.sharing = ALONE if self.method is None else self.method.deals_over(context.cp)
        place = context.tp.axis.rank * self.sharing.size + self.sharing.rank
        first_head = place * config.num_attention_heads // (context.tp.axis.size * self.sharing.size)
        self.dropout = AttentionDropout(config.attention_dropout, context.keys, layer, first_head)
        self.backend, self.way = config.attention_backend, context.tp.products.attention
        self.factor, self.cap = config.query_factor(layer), config.attn_logit_softcapping
        self.sinks, self.softmax_offset = config.softmax_type != "vanilla", None
        if config.softmax_type == "learnable":
            n, tp = config.num_attention_heads, context.tp
            placement = Placement((n,), Normal(config.init_method_std), shard={tp.axis.name: 0})
            self.softmax_offset = tp.parameter((size_per_rank("--num-attention-heads", n, tp.axis),), placement)
        self.compiled = compiles(config, context.tp.device)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask = None, is_whole: bool = False) -> Tensor:
        dtype = q.dtype
        heads = [x.float() for x in (q, k, v)] if self.way == "widened" else [q, k, v]  # to round once, at the end
        if self.factor != 1:
            heads[0] = heads[0] * self.factor
        if self.method is None or is_whole:
            out = self.of_whole_samples(*heads, mask)
        else:
            scoring = self.scoring(heads[0].movedim(2, 1))
            shared = SharedAttention(*heads, mask, self.dropout, self.backend, self.of_whole_samples, scoring)
            out = self.method.attend(shared, self.cp)
        return out.flatten(2).to(dtype)  # [s, b, n * d]

    def of_whole_samples(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> Tensor:
        """q [s, b, n, d]; k, v [s, b, groups, d] -> as q, by a kernel of KERNELS."""
        heads = [x.permute(1, 2, 0, 3) for x in (q, k, v)]  # [b, n, s, d]
        mask, bias = (mask.within, mask.bias) if isinstance(mask, Biased) else (mask, None)
        scoring = self.scoring(heads[0], bias)
        probability = self.dropout.probability if self.training else 0.0
        case = AttentionCase(*heads[:2], mask, probability, self.compiled, scoring)
        more = () if scoring is None else (scoring,)  # which a script's own kernel need not take
        return kernel_for(self.backend, case).compute(*heads, mask, self.dropout, *more).permute(2, 0, 1, 3)

    def scoring(self, q: Tensor, bias: Tensor | None = None) -> Scoring | None:
        """What differs from a plain softmax of the scores of q [b, n, s, d], n of this rank's heads. bias: of `Biased`."""
        if self.cap is None and not self.sinks:
            return None if bias is None else Scoring(None, None, bias)
        ones = q.new_zeros(q.shape[1]) if self.sinks and self.softmax_offset is None else None
        if self.softmax_offset is None:
            return Scoring(self.cap, ones, bias)
        first = self.sharing.rank * q.shape[1] if q.shape[1] < len(self.softmax_offset) else 0
        return Scoring(self.cap, self.softmax_offset[first : first + q.shape[1]], bias)


class DotProductAttention(CoreAttention):
    """forward(query [s, b, n, d], key, value, attention_mask) -> [s, b, n d]"""

    def __init__(
        self,
        config: Any,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        **options: Any,
    ):
        del attn_mask_type, attention_type
        options |= {"attention_dropout": attention_dropout, "softmax_scale": softmax_scale}
        if getattr(config, "window_size", None) is not None:
            raise ValueError("DotProductAttention has no window; build SelfAttention, which has config.window_size")
        ours = settings_of(config, **{name: value for name, value in options.items() if value is not None})
        super().__init__(ours, layer_number - 1, context_of(ours, config))

    def forward(self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **_: Any) -> Tensor:
        return super().forward(query, key, value, attention_mask)
