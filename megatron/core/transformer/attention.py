"""Self-attention with heads sharded over the tensor-parallel ranks, around a kernel of KERNELS."""

from functools import partial
from typing import NamedTuple

from torch import Tensor, nn

from megatron.core.base.lazy_imports import lazy_names
from megatron.core.context_parallel.cp_comm_type import SharedAttention
from megatron.core.ops.attention.kernels import AttentionCase, Scoring, kernel_for
from megatron.core.ops.attention.kv_cache import KeyValueCache
from megatron.core.ops.attention.masks import Biased, Mask, windowed
from megatron.core.ops.compile.compiled_region import compiles
from megatron.core.ops.dropout import AttentionDropout
from megatron.core.ops.fused_layer_ops import REGIONS
from megatron.core.ops.rotary_formulas import apply_rotary, cosines_and_sines, rotated, rotated_interleaved
from megatron.core.parallel.grid import ALONE
from megatron.core.sharding.placement import Normal, Placement, Rows
from megatron.core.tensor_parallel.linear_layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    TensorParallel,
    size_per_rank,
)
from megatron.core.transformer.layer_context import LayerContext, MakePart
from megatron.core.transformer.model_config import ModelConfig, query_group_problem
from megatron.core.transformer.qk_norm import make_query_key_norms, normed_heads
from megatron.core.transformer.recompute import recomputed


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


class ParallelAttention(nn.Module):
    """Multi-head or grouped-query self-attention: each rank computes n/t query heads and their groups/t key/value
    heads.

    The fused q/k/v weight holds the groups one after the other, each as its query heads, one key head, one value head:

        group 0: q0 q1 k v | group 1: q2 q3 k v | ...          rows [groups * (n / groups + 2) * d]

    With fewer groups than ranks, t/groups neighbours (axis "kv") hold the same key and value head, each with its own
    queries:

        rank 0: q0 k0 v0 | rank 1: q1 k0 v0 | rank 2: q2 k1 v1 | rank 3: q3 k1 v1          2 groups on 4 ranks

    Shared heads need no communication of activations. A rank's gradient of a shared head comes from its own queries;
    the parts are summed over the neighbours once a step. With `qk_layernorm` queries and keys are normalized, each head
    over its width or all over theirs.

    forward(x [s, b, h] ([s/t, b, h] under sequence parallelism), mask, angles [s, b or 1, width / 2], or those of each of
    `config.ropes`, cache) -> the shape of x.
    With a cache the queries of x also attend to the cached keys and values of earlier tokens.
    """

    gives_hidden_states = True  # for --inspect: forward returns [s, b, h], or [s/t, b, h] under sequence parallelism

    def __init__(self, config: ModelConfig, layer: int, context: LayerContext, *, make_core: MakePart = CoreAttention):
        super().__init__()
        tp = context.tp
        n, d = config.num_attention_heads, config.head_width
        groups = config.query_groups
        heads = size_per_rank("--num-attention-heads", n, tp.axis)
        if problem := query_group_problem(groups, tp.axis.size):
            raise ValueError(problem)
        shared = groups < tp.axis.size
        self.groups = 1 if shared else groups // tp.axis.size
        self.heads_per_group, self.head_width = heads // self.groups, d
        self.linear_qkv = ColumnParallelLinear(
            config.hidden_size,
            (n + 2 * groups) * d,
            tp=tp,
            init=config.init,
            bias=config.has_qkv_bias,
            skip_bias_add=compiles(config, tp.device) and not config.qk_layernorm,  # the region of heads adds it
            rows=shared_group_rows(n, groups, d, tp) if shared else (),
            interleaved=(n // groups * d, d, d),
        )
        self.q_layernorm, self.k_layernorm = make_query_key_norms(config, context)
        self.norms_over = tp.axis if config.qk_norm_over == "width" else None
        self.compiled = compiles(config, tp.device)
        self.core_attention, self.cp_size = make_core(config, layer, context), context.cp.axis.size
        self.keys, self.layer = context.keys, layer
        self.keys_before = config.keys_before(layer)  # None: no window
        self.rope = config.rope_of(layer)  # which of the model's; None: this layer does not rotate
        self.amplitude = 1.0 if self.rope is None else config.ropes[self.rope].amplitude
        self.rotation = rotated_interleaved if config.rotary_interleaved else rotated
        self.rotated_heads = REGIONS["heads_interleaved" if config.rotary_interleaved else "heads"]
        self.recomputes_core = config.recomputes("core_attn")
        self.linear_proj = RowParallelLinear(
            n * d, config.hidden_size, tp=tp, init=config.output_init, bias=config.has_proj_bias
        )

    def forward(
        self, x: Tensor, mask: Tensor | None = None, angles: Tensor | None = None, cache: KeyValueCache | None = None
    ) -> Tensor:
        return self.linear_proj(self.attended(x, mask, angles, cache))[0]

    def attended(
        self, x: Tensor, mask: Tensor | None = None, angles: Tensor | None = None, cache: KeyValueCache | None = None
    ) -> Tensor:
        """[s, b, n/t d]: the heads' results, before the output layer."""
        return self.of_heads(self.heads_of(*self.linear_qkv(x), angles), mask, cache)

    def of_heads(self, heads: "Heads", mask: Mask = None, cache: KeyValueCache | None = None) -> Tensor:
        """`attended`, from the heads."""
        k, v = heads[1:] if cache is None else cache.append(self.layer, *heads[1:])
        mask = windowed(mask, self.keys_before, len(k) * self.cp_size)
        if self.cp_size > 1 and cache is not None and not cache.shares:
            return self.core_attention(heads.q, k, v, mask, is_whole=True)
        attend = partial(recomputed, self.core_attention, self.keys) if self.recomputes_core else self.core_attention
        return attend(heads.q, k, v, mask)

    def heads_of(self, fused: Tensor, bias: Tensor | None, angles: Tensor | None = None) -> "Heads":
        """The heads of a product with the fused q/k/v weight, to which `bias` is still to be added, normalized and rotated."""
        fused = fused.view(*fused.shape[:2], self.groups, self.heads_per_group + 2, self.head_width)
        if angles is not None:
            angles = None if self.rope is None else angles[self.rope] if angles.dim() == 4 else angles
        if self.compiled and self.q_layernorm is None:
            turn = (None, None) if angles is None else cosines_and_sines(angles, self.amplitude, fused.dtype)
            return Heads(*self.rotated_heads.compiled(fused, bias, *turn, self.heads_per_group))
        fused = fused if bias is None else fused + bias.view(fused.shape[2:])
        heads = Heads(*(part.flatten(2, 3) for part in fused.split([self.heads_per_group, 1, 1], dim=3)))
        if self.q_layernorm is not None:
            q, k = normed_heads((self.q_layernorm, self.k_layernorm), heads.q, heads.k, self.norms_over)
            heads = heads._replace(q=q, k=k)
        if angles is not None:
            q, k = (apply_rotary(x, angles, self.amplitude, self.rotation) for x in heads[:2])
            heads = heads._replace(q=q, k=k)
        return heads


class Heads(NamedTuple):
    """The query, key and value heads of this rank."""

    q: Tensor  # [s, b, n/t, d]
    k: Tensor  # [s, b, groups/t, d]
    v: Tensor  # as k


def shared_group_rows(n: int, groups: int, d: int, tp: TensorParallel) -> tuple[Rows, ...]:
    """The rows of the fused q/k/v weight that a rank holds if groups < t: its queries, then its group's key and value
    head.

    4 heads of width 1 in 1 group on 2 ranks, rows q0 q1 q2 q3 k v:  rank 0 holds 0:2 and 4:6, rank 1 holds 2:4 and 4:6.
    """
    neighbours, per_group = tp.axis.size // groups, n // groups
    if tp.kv is None or tp.kv.size != neighbours:
        raise ValueError(
            f"{groups} query group(s) on {tp.axis.size} tensor-parallel ranks: {neighbours} ranks share each key/value head, but "
            f"the mesh joins {tp.kv.size if tp.kv else 1}; give initialize_model_parallel(ranks_per_kv_head={neighbours}), "
            'and TensorParallel(kv=mesh["kv"])'
        )
    first = tp.axis.rank // neighbours * (per_group + 2)  # of my group, in heads
    queries = per_group // neighbours
    mine = first + tp.axis.rank % neighbours * queries
    key = first + per_group
    return Rows(mine * d, (mine + queries) * d), Rows(key * d, (key + 2) * d, shared_over=tp.kv.name)


# Megatron's names.
__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "megatron.core.classic.cross_attention": "CrossAttention CrossAttentionSubmodules",
        "megatron.core.classic.layers": "SelfAttention SelfAttentionSubmodules",
    },
)
