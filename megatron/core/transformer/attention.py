"""Self-attention with heads sharded over the tensor-parallel ranks, around a kernel of KERNELS."""

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor, nn

from megatron.core.base.lazy_imports import lazy_names
from megatron.core.base.unsupported_arguments import takes
from megatron.core.ops.attention.kv_cache import KeyValueCache
from megatron.core.ops.attention.masks import Mask, windowed
from megatron.core.ops.compile.compiled_region import compiles
from megatron.core.ops.fused_layer_ops import REGIONS
from megatron.core.ops.rotary_formulas import apply_rotary, cosines_and_sines, rotated, rotated_interleaved
from megatron.core.sharding.placement import Rows
from megatron.core.tensor_parallel import linear_layers
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.linear_layers import TensorParallel, size_per_rank
from megatron.core.transformer.cross_attention import ParallelCrossAttention
from megatron.core.transformer.dot_product_attention import CoreAttention, DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.layer_build_context import LayerContext, MakePart
from megatron.core.transformer.model_config import ModelConfig, query_group_problem
from megatron.core.transformer.module import context_of, settings_of
from megatron.core.transformer.qk_norm import make_query_key_norms, normed_heads
from megatron.core.transformer.recompute import recomputed
from megatron.core.transformer.spec_utils import _is_own, build_module, get_module
from megatron.core.transformer.torch_norm import FusedLayerNorm


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
        self.linear_qkv = linear_layers.ColumnParallelLinear(
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
        self.linear_proj = linear_layers.RowParallelLinear(
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
        """The heads of a product with the fused q/k/v weight, to which `bias` is still to be added, normalized and
        rotated."""
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


@dataclass
class SelfAttentionSubmodules:
    linear_qkv: Any = None
    core_attention: Any = None
    linear_proj: Any = None
    q_layernorm: Any = None
    k_layernorm: Any = None


class SelfAttention(ParallelAttention):
    """forward(hidden_states [s, b, h], attention_mask, rotary_pos_emb=[s, 1, 1, d]) -> (output [s, b, h], bias or None)"""

    @takes(cp_comm_type=None, pg_collection=None)
    def __init__(
        self,
        config: Any,
        submodules: SelfAttentionSubmodules,
        layer_number: int,
        attn_mask_type: Any = AttnMaskType.padding,
    ):
        norms = {"qk_layernorm": True} if FusedLayerNorm in (submodules.q_layernorm, submodules.k_layernorm) else {}
        ours, made = settings_of(config, **norms), submodules.core_attention
        of_core = {"layer_number": layer_number, "attn_mask_type": attn_mask_type, "attention_type": "self"}
        own_core = lambda *_: build_module(made, config=config, **of_core)  # noqa: E731
        core = {"make_core": own_core} if _is_own(made, DotProductAttention) else {}
        super().__init__(ours, layer_number - 1, context_of(ours, config), **core)
        self.config = config
        self.layer_number, self.attn_mask_type = layer_number, attn_mask_type
        h, d = ours.hidden_size, ours.head_width
        queries = ours.num_attention_heads * d
        options = {"config": config, "is_expert": False}
        if _is_own(submodules.linear_qkv, ColumnParallelLinear):
            of_qkv = {"gather_output": False, "skip_bias_add": False, "tp_comm_buffer_name": "qkv"}
            of_qkv |= {"init_method": config.init_method, "bias": config.add_bias_linear or config.add_qkv_bias}
            width = queries + 2 * ours.query_groups * d
            self.linear_qkv = build_module(submodules.linear_qkv, h, width, **options, **of_qkv)
        self.linear_proj.skip_bias_add = True
        if _is_own(submodules.linear_proj, RowParallelLinear):
            of_proj = {"input_is_parallel": True, "skip_bias_add": True, "tp_comm_buffer_name": "proj"}
            of_proj |= {"init_method": config.output_layer_init_method, "bias": config.add_bias_linear}
            self.linear_proj = build_module(submodules.linear_proj, queries, h, **options, **of_proj)
        of_norm = {"config": config, "hidden_size": d, "eps": ours.norm_epsilon}
        if _is_own(submodules.q_layernorm, FusedLayerNorm):
            self.q_layernorm = build_module(submodules.q_layernorm, **of_norm)
        if _is_own(submodules.k_layernorm, FusedLayerNorm):
            self.k_layernorm = build_module(submodules.k_layernorm, **of_norm)

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Any = None,
        rotary_pos_emb: Tensor | None = None,
        inference_params: None = None,
        packed_seq_params: None = None,
    ) -> tuple[Tensor, Tensor | None]:
        if inference_params is not None or packed_seq_params is not None:
            raise NotImplementedError("inference_params and packed_seq_params are not built yet; leave them out")
        angles = None
        if rotary_pos_emb is not None:
            angles = rotary_pos_emb[:, :, 0, : rotary_pos_emb.shape[-1] // 2]
        return self.linear_proj(self.attended(hidden_states, attention_mask, angles))


@dataclass
class CrossAttentionSubmodules:
    linear_q: Any = None
    linear_kv: Any = None
    core_attention: Any = None
    linear_proj: Any = None


_OURS = [ColumnParallelLinear, ColumnParallelLinear, DotProductAttention, RowParallelLinear]


class CrossAttention(ParallelCrossAttention):
    """forward(hidden_states [s, b, h], attention_mask bool [.., s, m], key_value_states [m, b, h]) -> (output, bias
    or None)"""

    @takes(cp_comm_type=None, pg_collection=None)
    def __init__(
        self,
        config: Any,
        submodules: CrossAttentionSubmodules,
        layer_number: int,
        attn_mask_type: Any = AttnMaskType.padding,
    ):
        if [get_module(part) for part in vars(submodules).values()] != _OURS:
            raise NotImplementedError("CrossAttention: parts of a script's own are not built; leave those of ours")
        ours = settings_of(config)
        super().__init__(ours, layer_number - 1, context_of(ours, config))
        self.config, self.attn_mask_type = config, attn_mask_type
        self.layer_number, self.linear_proj.skip_bias_add = layer_number, True

    @takes(inference_params=None, rotary_pos_emb=None, packed_seq_params=None)
    def forward(
        self, hidden_states: Tensor, attention_mask: Tensor | None, key_value_states: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        return self.linear_proj(self.attended(hidden_states, key_value_states, attention_mask))


# Megatron's names.
__getattr__, __dir__ = lazy_names(__name__, {})
