"""Core attention, between projected heads: our `CoreAttention`, and Megatron's `DotProductAttention` over it."""

from typing import Any

from torch import Tensor, nn

from megatron.core.base.unsupported_arguments import accepts_defaults_only
from megatron.core.context_parallel.cp_attention import AttentionInputs
from megatron.core.ops.attention.document_and_window_masks import Mask, MaskWithBias, PrefixTrees
from megatron.core.ops.attention.kernels import AttentionCase, SoftmaxOptions, kernel_or_fallback, takes_fewer_queries
from megatron.core.ops.compile.compiled_region import compiles
from megatron.core.ops.count_flops_by_module import CountsFlops, Flops, LayerInput, attention_flops, flops_of
from megatron.core.ops.layout_invariant_dropout import AttentionDropout
from megatron.core.parallel.rank_grid import ALONE
from megatron.core.process_groups_config import OWN_GROUPS_BY_NAME
from megatron.core.sharding.placement import Normal, Placement
from megatron.core.tensor_parallel.linear_layers import size_per_rank
from megatron.core.transformer.layer_parallel_context import LayerContext
from megatron.core.transformer.model_config import ModelConfig
from megatron.core.transformer.module import of_process


class CoreAttention(nn.Module):
    """Compute softmax(q k^T / sqrt(d)) v of this rank's heads, by a kernel of KERNELS or over context-parallel ranks.

    forward(q [s, b, n, d], k and v [s, b, groups, d], mask) -> [s, b, n d]; n, groups: this rank's. A mask of None is
    causal; a tensor is bool [.., s, s], True where masked. Under context parallelism s counts this rank's rows of the
    sample, and every rank of cp must call, unless is_whole: then every rank has these samples whole and computes them
    by itself. Raises ConfigError if no kernel of `--attention-backend` computes the case.
    """

    attends_over_whole_samples = True  # see `LayerContext`

    def __init__(self, config: ModelConfig, layer: int, context: LayerContext):
        super().__init__()
        self.cp = context.cp
        self.method = context.cp.method_of(layer)  # None without context parallelism
        # The ranks over which this tensor-parallel rank's heads are dealt out (Ulysses); ALONE: heads stay together.
        self.head_axis = ALONE if self.method is None else self.method.head_axis(context.cp)
        head_rank = context.tp.axis.rank * self.head_axis.size + self.head_axis.rank
        first_head = head_rank * config.num_attention_heads // (context.tp.axis.size * self.head_axis.size)
        self.dropout = AttentionDropout(config.attention_dropout, context.keys, layer, first_head)
        self.backend = config.attention_backend
        self.width = config.num_attention_heads * config.head_width  # of all ranks' query heads
        self.way = context.tp.matmul_modes.attention
        self.query_factor = config.query_factor(layer)
        self.softcap = config.attn_logit_softcapping
        self.compiled = compiles(config, context.tp.device)

        # sinks: a further term of the softmax's denominator, exp(0) or exp of a learned logit of each head
        self.sinks = config.softmax_type != "vanilla"
        self.softmax_offset = None
        if config.softmax_type == "learnable":
            n = config.num_attention_heads
            tp = context.tp
            placement = Placement((n,), Normal(config.init_method_std), shard={tp.axis.name: 0})
            self.softmax_offset = tp.parameter((size_per_rank("--num-attention-heads", n, tp.axis),), placement)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask = None, is_whole: bool = False) -> Tensor:
        dtype = q.dtype
        if self.way == "widened":  # to round once, at the end
            q = q.float()
            k = k.float()
            v = v.float()
        if self.query_factor != 1:
            q = q * self.query_factor
        if self.method is None or is_whole:
            out = self.attend_whole_samples(q, k, v, mask)
        else:
            scoring = self.scoring(q.movedim(2, 1))
            shared = AttentionInputs(q, k, v, mask, self.dropout, self.backend, self.attend_whole_samples, scoring)
            out = self.method.attend(shared, self.cp)
        return out.flatten(2).to(dtype)  # [s, b, n d]

    def attend_whole_samples(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> Tensor:
        """Run the attention kernel on whole samples: q [s, b, n, d]; k, v [s, b, groups, d] -> [s, b, n, d].

        mask: a tensor is bool [.., s, s], True where masked; a bias in it [n, s, s]. No communication.
        """
        q, k, v = (x.permute(1, 2, 0, 3) for x in (q, k, v))  # [b, n, s, d]
        bias = None
        if isinstance(mask, MaskWithBias):
            bias = mask.bias
            mask = mask.within
        scoring = self.scoring(q, bias)
        probability = self.dropout.probability if self.training else 0.0
        case = AttentionCase(q, k, mask, probability, self.compiled, scoring)
        kernel = kernel_or_fallback(self.backend, case)
        # a script's own kernel need not take the options of a softmax that is plain
        options = () if scoring is None else (scoring,)
        return kernel.compute(q, k, v, mask, self.dropout, *options).permute(2, 0, 1, 3)  # [s, b, n, d]

    def takes_fewer_queries(self, mask: Mask) -> bool:
        """Return whether forward takes some queries of `PrefixTrees` alone, with the mask `QueriesOfTrees`."""
        has_plain_softmax = self.softcap is None and not self.sinks
        return (
            type(mask) is PrefixTrees
            and has_plain_softmax
            and self.method is None
            and takes_fewer_queries(self.backend)
        )

    def count_flops(self, x: LayerInput) -> Flops:
        return attention_flops(x, self.width)

    def scoring(self, q: Tensor, bias: Tensor | None = None) -> SoftmaxOptions | None:
        """Return how the softmax differs from a plain one, None if it does not.

        q: [b, n, s, d], of all or some of this tensor-parallel rank's heads. bias: [n, s, s], added to the scores.
        """
        if self.softcap is None and not self.sinks:
            return None if bias is None else SoftmaxOptions(None, None, bias)
        if self.softmax_offset is not None:
            # the heads of q are a part of this rank's after the all-to-all of Ulysses
            first = self.head_axis.rank * q.shape[1] if q.shape[1] < len(self.softmax_offset) else 0
            sinks = self.softmax_offset[first : first + q.shape[1]]
        elif self.sinks:
            sinks = q.new_zeros(q.shape[1])  # exp(0) = 1
        else:
            sinks = None
        return SoftmaxOptions(self.softcap, sinks, bias)


def core_attention_flops(core: nn.Module, x: LayerInput, width: int, *, recompute: bool = False) -> Flops:
    """Return the FLOPs of a layer's core attention: what it says itself, else those of our `CoreAttention`.

    width: of all query heads together. recompute: the backward runs its forward again.
    """
    if isinstance(core, CountsFlops):
        return flops_of(core, x, recompute=recompute)
    flops = flops_of(core, x) + attention_flops(x, width)
    return flops.recomputed() if recompute else flops


class DotProductAttention(CoreAttention):
    """Core attention with Megatron's arguments.

    forward(query [s, b, n, d], key and value [s, b, groups, d], attention_mask [b or 1, 1, s, s], True where masked)
    -> [s, b, n d]; n, groups: this rank's. Every rank of cp must call. Building it raises ValueError for a config
    with a window.
    """

    @accepts_defaults_only(pg_collection=OWN_GROUPS_BY_NAME, model_comm_pgs=OWN_GROUPS_BY_NAME)
    def __init__(
        self,
        config: Any,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        *,
        layer_context: LayerContext | None = None,
        settings: ModelConfig | None = None,
        **options: Any,
    ):
        del attn_mask_type, attention_type
        if getattr(config, "window_size", None) is not None:
            raise ValueError(
                "DotProductAttention does not support a sliding window; build SelfAttention, which reads "
                "config.window_size"
            )
        options |= {"attention_dropout": attention_dropout, "softmax_scale": softmax_scale}
        requested = {name: value for name, value in options.items() if value is not None}
        model_config, place = of_process(config, layer_context, settings, **requested)
        super().__init__(model_config, layer_number - 1, place)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **_: Any) -> Tensor:
        return super().forward(query, key, value, attention_mask)
