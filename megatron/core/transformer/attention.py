"""Self-attention with heads sharded over the tensor-parallel ranks: ours, and Megatron's `SelfAttention` over it.

    s, b, h    sequence, batch, hidden          n, groups    query heads, key/value heads of the whole layer
    t, c       tensor-, context-parallel ranks  d            width of a head

Shapes on a rank, with sequence parallelism in parentheses, and Ulysses (`--cp-comm-type a2a`) inside `core_attention`:

    x                [s, b, h] ([s/t, b, h])      s: this rank's rows of the sample
    mixed_qkv        [s, b, (n + 2 groups)/t d]   linear_qkv gathers the sequence and computes this rank's heads
    q; k, v          [s, b, n/t, d]; [s, b, groups/t, d]
    core attention   under a2a an all-to-all over c gives [c s, b, n/t/c, d], and back
    core_attn_out    [s, b, n/t d]
    result           [s, b, h] ([s/t, b, h])      linear_proj sums over t
"""

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from torch import Tensor, nn

from megatron.core.base.lazy_imports import lazy_names
from megatron.core.base.unsupported_arguments import accepts_defaults_only
from megatron.core.ops.apply_rotary_angles import cosines_and_sines, rotated, rotated_interleaved
from megatron.core.ops.attention.document_and_window_masks import Mask, QueriesOfTrees, of_last_keys, with_window
from megatron.core.ops.attention.kv_cache import AttentionCache
from megatron.core.ops.compile.compiled_region import compiles
from megatron.core.ops.count_flops_by_module import Flops, LayerInput, flops_of, further_flops
from megatron.core.ops.fused_layer_ops import REGIONS
from megatron.core.process_groups_config import OWN_GROUPS, OWN_GROUPS_BY_NAME
from megatron.core.sharding.placement import Rows
from megatron.core.tensor_parallel.linear_layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    TensorParallel,
    size_per_rank,
)
from megatron.core.transformer.cross_attention import ParallelCrossAttention
from megatron.core.transformer.dot_product_attention import CoreAttention, DotProductAttention, core_attention_flops
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.layer_parallel_context import LayerContext, MakePart
from megatron.core.transformer.model_config import ModelConfig, query_group_problem
from megatron.core.transformer.module import of_process
from megatron.core.transformer.qk_norm import make_qk_norms, qk_norm
from megatron.core.transformer.recompute_without_rng_state import recompute_in_backward
from megatron.core.transformer.spec_utils import build_module, get_module, is_custom_part
from megatron.core.transformer.torch_norm import FusedLayerNorm


class ParallelAttention(nn.Module):
    """Compute multi-head or grouped-query self-attention: n/t query heads and groups/t key/value heads on each rank.

    The fused q/k/v weight holds the groups one after the other, each as its query heads, one key head, one value head:

        group 0: q0 q1 k v | group 1: q2 q3 k v | ...          rows [groups * (n / groups + 2) * d]

    With fewer groups than ranks, t/groups neighbours (axis "kv") hold the same key and value head, each with
    queries of its own:

        rank 0: q0 k0 v0 | rank 1: q1 k0 v0 | rank 2: q2 k1 v1 | rank 3: q3 k1 v1          2 groups on 4 ranks

    Shared heads need no communication of activations. A rank's gradient of a shared head comes from its own queries;
    these partial gradients are summed over the neighbours once a step. With `qk_layernorm` queries and keys are
    normalized, each head over its width or all heads together.

    forward(x [s, b, h] ([s/t, b, h] under sequence parallelism), mask, angles, cache) -> the shape of x. mask: a
    `Mask`; a tensor is bool [b or 1, 1, s, s], True where masked. angles: [s, b or 1, width / 2], or with several ropes
    in the model [ropes, s, b or 1, width / 2]. With a cache the queries of x also attend to the cached keys and values
    of earlier tokens. Every rank of tp must call, and under context parallelism every rank of cp. Building it raises
    ValueError if the ranks do not divide the heads.
    """

    gives_hidden_states = True  # for --inspect: forward returns [s, b, h], or [s/t, b, h] under sequence parallelism
    wanted_rows: Tensor | None = None  # see `TransformerLayer.wanted_rows`

    def __init__(self, config: ModelConfig, layer: int, context: LayerContext, *, make_core: MakePart = CoreAttention):
        super().__init__()
        tp = context.tp
        n = config.num_attention_heads
        d = config.head_width
        groups = config.query_groups

        # the heads of this rank
        heads = size_per_rank("--num-attention-heads", n, tp.axis)
        if problem := query_group_problem(groups, tp.axis.size):
            raise ValueError(problem)
        shares_kv_heads = groups < tp.axis.size
        self.groups = 1 if shares_kv_heads else groups // tp.axis.size
        self.heads_per_group = heads // self.groups
        self.head_width = d

        self.linear_qkv = ColumnParallelLinear(
            config.hidden_size,
            (n + 2 * groups) * d,
            tp=tp,
            init=config.init,
            bias=config.has_qkv_bias,
            skip_bias_add=compiles(config, tp.device) and not config.qk_layernorm,  # the compiled op of heads adds it
            rows=shared_group_rows(n, groups, d, tp) if shares_kv_heads else (),
            interleaved=(n // groups * d, d, d),
        )
        self.q_layernorm, self.k_layernorm = make_qk_norms(config, context)
        self.clip = config.clip_qkv
        self.qk_norm_axis = (
            tp.axis if config.qk_norm_over == "width" else None
        )  # ranks over whose heads a mean is taken
        self.compiled = compiles(config, tp.device)

        # core attention
        self.core_attention = make_core(config, layer, context)
        self.cp_size = context.cp.axis.size
        self.keys = context.keys
        self.layer = layer
        self.window_left = config.window_left(layer)  # None: no window
        self.recomputes_core = config.recomputes("core_attn")
        self.query_width = n * d  # of all ranks' query heads

        # rotary positions
        self.rope = config.rope_of(layer)  # index into config.ropes; None: this layer does not rotate
        self.amplitude = 1.0 if self.rope is None else config.ropes[self.rope].amplitude
        self.rotation = rotated_interleaved if config.rotary_interleaved else rotated
        self.compiled_heads = REGIONS["heads_interleaved" if config.rotary_interleaved else "heads"]

        self.linear_proj = RowParallelLinear(
            n * d, config.hidden_size, tp=tp, init=config.output_init, bias=config.has_proj_bias
        )

    def forward(
        self, x: Tensor, mask: Tensor | None = None, angles: Tensor | None = None, cache: AttentionCache | None = None
    ) -> Tensor:
        if self.wanted_rows is None:
            core_attn_out = self.core_attn_out(x, mask, angles, cache)  # [s, b, n/t d]
        else:
            core_attn_out = self.core_attn_out_of_rows(self.wanted_rows, x, mask, angles)  # [rows, b, n/t d]
        return self.linear_proj(core_attn_out)[0]  # [s, b, h], or of the wanted rows

    def core_attn_out(
        self, x: Tensor, mask: Tensor | None = None, angles: Tensor | None = None, cache: AttentionCache | None = None
    ) -> Tensor:
        """Return the attention of this rank's heads [s, b, n/t d], before the output projection.

        Arguments are those of forward. Every rank of tp must call.
        """
        return self.attend(self.get_query_key_value_tensors(*self.linear_qkv(x), angles), mask, cache)

    def core_attn_out_of_rows(self, rows: Tensor, x: Tensor, mask: Mask, angles: Tensor | None) -> Tensor:
        """Return `core_attn_out` of these rows alone, [rows, b, n/t d]. rows: indices in s, ascending.

        Where the core attention can, it is given no other queries. Every rank of tp must call.
        """
        heads = self.get_query_key_value_tensors(*self.linear_qkv(x), angles)
        has_window = with_window(mask, self.window_left, len(x)) is not mask
        core = self.core_attention
        if (
            type(core) is CoreAttention
            and core.takes_fewer_queries(mask)
            and not has_window
            and 2 * len(rows) <= len(x)
        ):
            return core(heads.q[rows], heads.k, heads.v, QueriesOfTrees(mask, rows))
        return self.attend(heads, mask)[rows]

    def get_query_key_value_tensors(
        self, mixed_qkv: Tensor, bias: Tensor | None, angles: Tensor | None = None
    ) -> "Heads":
        """Split the product with the fused q/k/v weight into heads, normalize, clip and rotate them.

        mixed_qkv: [s, b, (n + 2 groups)/t d] -> q [s, b, n/t, d]; k, v [s, b, groups/t, d]. bias:
        [(n + 2 groups)/t d], of `linear_qkv`, if it is still to be added. angles: see forward. With
        `--qk-norm-over width` every rank of tp must call.
        """
        s, b, _ = mixed_qkv.shape
        # [s, b, groups/t, n/groups + 2, d], or with shared key/value heads [s, b, 1, n/t + 2, d]
        mixed_qkv = mixed_qkv.view(s, b, self.groups, self.heads_per_group + 2, self.head_width)
        if self.rope is None:
            angles = None
        elif angles is not None and angles.dim() == 4:
            angles = angles[self.rope]  # [s, b or 1, width / 2]

        # compiled: bias, split and rotation in one pass
        if self.compiled and self.q_layernorm is None and self.clip is None:
            cos = sin = None
            if angles is not None:
                cos, sin = cosines_and_sines(angles, self.amplitude, mixed_qkv.dtype)
            return Heads(*self.compiled_heads.compiled(mixed_qkv, bias, cos, sin, self.heads_per_group))

        if bias is not None:
            mixed_qkv = mixed_qkv + bias.view(mixed_qkv.shape[2:])
        q, k, v = mixed_qkv.split([self.heads_per_group, 1, 1], dim=3)
        if angles is not None and self.q_layernorm is None and self.clip is None:
            # rotated while they are views of the product, which `flatten` would copy
            cos, sin = cosines_and_sines(angles, self.amplitude, mixed_qkv.dtype)
            q = self.rotation(q, cos, sin)
            k = self.rotation(k, cos, sin)
            angles = None
        heads = Heads(q.flatten(2, 3), k.flatten(2, 3), v.flatten(2, 3))  # [s, b, n/t, d], [s, b, groups/t, d] twice
        if self.q_layernorm is not None:
            q, k = qk_norm((self.q_layernorm, self.k_layernorm), heads.q, heads.k, self.qk_norm_axis)
            heads = heads._replace(q=q, k=k)
        if self.clip is not None:
            heads = Heads(*(x.clamp(-self.clip, self.clip) for x in heads))
        if angles is not None:
            cos, sin = cosines_and_sines(angles, self.amplitude, mixed_qkv.dtype)
            heads = heads._replace(q=self.rotation(heads.q, cos, sin), k=self.rotation(heads.k, cos, sin))
        return heads

    def attend(self, heads: "Heads", mask: Mask = None, cache: AttentionCache | None = None) -> Tensor:
        """Run the core attention of these heads, in this layer's window: -> [s, b, n/t d].

        heads: of this rank, as `get_query_key_value_tensors` returns them. Every rank of cp must call.
        """
        q, k, v = heads
        if cache is not None:
            attention = CoreAttentionOfLayer(self.core_attention, mask, self.window_left, self.cp_size)
            return cache.attend(self.layer, q, (k, v), attention)
        mask = with_window(mask, self.window_left, len(k) * self.cp_size)
        if self.recomputes_core:
            return recompute_in_backward(self.core_attention, self.keys, q, k, v, mask, modules=[self.core_attention])
        return self.core_attention(q, k, v, mask)

    def count_flops(self, x: LayerInput) -> Flops:
        x = replace(x, window_left=self.window_left, memory=None)
        heads = x.after(self.linear_qkv, self.q_layernorm, self.k_layernorm)
        core = core_attention_flops(self.core_attention, heads, self.query_width, recompute=self.recomputes_core)
        flops = flops_of(self.linear_qkv, x) + core
        flops += flops_of(self.linear_proj, heads.after(self.core_attention))
        return flops + further_flops(self, x, (self.linear_qkv, self.core_attention, self.linear_proj))


@dataclass(frozen=True)
class CoreAttentionOfLayer:
    """What a cache calls: a layer's core attention with its mask and window (`kv_cache.py: LayerAttention`)."""

    core_attention: nn.Module
    mask: Mask
    window_left: int | None
    cp_size: int
    is_whole: bool = False  # every context-parallel rank has all keys and computes the same new tokens

    def over_whole_sequence(self) -> "CoreAttentionOfLayer":
        return replace(self, is_whole=True)

    def over_last_columns(self, columns: int) -> "CoreAttentionOfLayer":
        return replace(self, mask=of_last_keys(self.mask, columns))

    def compute(self, q: Tensor, *entries: Tensor) -> Tensor:
        """Return the attention of q [new, b, n/t, d] over keys and values [keys, b, groups/t, d]: [new, b, n/t d].

        In the prompts' forward of ranks that share them, the entries are this rank's part, and every rank of cp must call.
        """
        k, v = entries
        mask = with_window(self.mask, self.window_left, len(k) * self.cp_size)
        if self.is_whole:
            return self.core_attention(q, k, v, mask, is_whole=True)
        return self.core_attention(q, k, v, mask)


class Heads(NamedTuple):
    """The query, key and value heads of this rank."""

    q: Tensor  # [s, b, n/t, d]
    k: Tensor  # [s, b, groups/t, d]
    v: Tensor  # [s, b, groups/t, d]


def shared_group_rows(n: int, groups: int, d: int, tp: TensorParallel) -> tuple[Rows, ...]:
    """Return the rows of the fused q/k/v weight on this rank if groups < t: its queries, its group's key and value.

    Raises ValueError if the mesh's axis "kv" does not join the ranks that share a head.

    4 heads of width 1 in 1 group on 2 ranks, rows q0 q1 q2 q3 k v:  rank 0 holds 0:2 and 4:6, rank 1 holds 2:4 and 4:6.
    """
    neighbours = tp.axis.size // groups  # ranks that share a key/value head
    heads_per_group = n // groups
    if tp.kv is None or tp.kv.size != neighbours:
        raise ValueError(
            f"{groups} query group(s) on {tp.axis.size} tensor-parallel ranks: each key/value head must be "
            f"shared by {neighbours} ranks, but in the mesh it is shared by {tp.kv.size if tp.kv else 1}; give "
            f'initialize_model_parallel(ranks_per_kv_head={neighbours}), and TensorParallel(kv=mesh["kv"])'
        )
    # all in heads
    group_start = tp.axis.rank // neighbours * (heads_per_group + 2)
    queries = heads_per_group // neighbours
    query_start = group_start + tp.axis.rank % neighbours * queries
    key_start = group_start + heads_per_group
    return (
        Rows(query_start * d, (query_start + queries) * d),
        Rows(key_start * d, (key_start + 2) * d, shared_over=tp.kv.name),
    )


@dataclass
class SelfAttentionSubmodules:
    """The parts of a `SelfAttention`: classes, or specs of them."""

    linear_qkv: Any = None
    core_attention: Any = None
    linear_proj: Any = None
    q_layernorm: Any = None
    k_layernorm: Any = None


class SelfAttention(ParallelAttention):
    """Self-attention with Megatron's arguments, of the parts in `submodules`.

    forward(hidden_states [s, b, h] ([s/t, b, h] under sequence parallelism), attention_mask [b or 1, 1, s, s], True
    where masked, rotary_pos_emb [s, 1, 1, width]) -> (output, shaped as hidden_states, bias [h] or None). Every rank of
    tp must call. Raises NotImplementedError for inference_params and packed_seq_params.
    """

    @accepts_defaults_only(
        "attn_mask_type", cp_comm_type=None, pg_collection=OWN_GROUPS, model_comm_pgs=OWN_GROUPS_BY_NAME
    )
    def __init__(
        self,
        config: Any,
        submodules: SelfAttentionSubmodules,
        layer_number: int,
        attn_mask_type: Any = AttnMaskType.padding,
        *,
        layer_context: LayerContext | None = None,
        settings: ModelConfig | None = None,
    ):
        overrides = {}
        if FusedLayerNorm in (submodules.q_layernorm, submodules.k_layernorm):
            overrides["qk_layernorm"] = True
        model_config, place = of_process(config, layer_context, settings, **overrides)

        def make_custom_core(*_: Any) -> nn.Module:
            return build_module(
                submodules.core_attention,
                config=config,
                layer_number=layer_number,
                attn_mask_type=attn_mask_type,
                attention_type="self",
            )

        core = {"make_core": make_custom_core} if is_custom_part(submodules.core_attention, DotProductAttention) else {}
        super().__init__(model_config, layer_number - 1, place, **core)
        if not model_config.ropes:
            self.rope = 0  # Megatron's config has no positions: it is the model that has, and gives the angles
        self.config = config
        self.layer_number = layer_number
        self.attn_mask_type = attn_mask_type
        self.linear_proj.skip_bias_add = True

        # a script's own parts take the place of ours
        hidden_size = model_config.hidden_size
        head_width = model_config.head_width
        query_width = model_config.num_attention_heads * head_width
        if is_custom_part(submodules.linear_qkv, ColumnParallelLinear):
            self.linear_qkv = build_module(
                submodules.linear_qkv,
                hidden_size,
                query_width + 2 * model_config.query_groups * head_width,
                config=config,
                is_expert=False,
                gather_output=False,
                skip_bias_add=False,
                tp_comm_buffer_name="qkv",
                init_method=config.init_method,
                bias=config.add_bias_linear or config.add_qkv_bias,
            )
        if is_custom_part(submodules.linear_proj, RowParallelLinear):
            self.linear_proj = build_module(
                submodules.linear_proj,
                query_width,
                hidden_size,
                config=config,
                is_expert=False,
                input_is_parallel=True,
                skip_bias_add=True,
                tp_comm_buffer_name="proj",
                init_method=config.output_layer_init_method,
                bias=config.add_bias_linear,
            )
        norm_options = {"config": config, "hidden_size": head_width, "eps": model_config.norm_epsilon}
        if is_custom_part(submodules.q_layernorm, FusedLayerNorm):
            self.q_layernorm = build_module(submodules.q_layernorm, **norm_options)
        if is_custom_part(submodules.k_layernorm, FusedLayerNorm):
            self.k_layernorm = build_module(submodules.k_layernorm, **norm_options)

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
            # Megatron repeats the angles for both halves of a head
            angles = rotary_pos_emb[:, :, 0, : rotary_pos_emb.shape[-1] // 2]  # [s, 1, width / 2]
        return self.linear_proj(self.core_attn_out(hidden_states, attention_mask, angles))


@dataclass
class CrossAttentionSubmodules:
    """The parts of a `CrossAttention`: classes, or specs of them."""

    linear_q: Any = None
    linear_kv: Any = None
    core_attention: Any = None
    linear_proj: Any = None


# the parts that CrossAttention accepts, in the order of CrossAttentionSubmodules
CROSS_ATTENTION_PARTS = [ColumnParallelLinear, ColumnParallelLinear, DotProductAttention, RowParallelLinear]


class CrossAttention(ParallelCrossAttention):
    """Attention to another sequence, with Megatron's arguments.

    forward(hidden_states [s, b, h], attention_mask bool [.., s or 1, m], True where masked, key_value_states [m, b, h])
    -> (output [s, b, h], bias [h] or None). Every rank of tp must call. Building it raises NotImplementedError for
    parts of a script's own.
    """

    @accepts_defaults_only(
        "attn_mask_type", cp_comm_type=None, pg_collection=OWN_GROUPS, model_comm_pgs=OWN_GROUPS_BY_NAME
    )
    def __init__(
        self,
        config: Any,
        submodules: CrossAttentionSubmodules,
        layer_number: int,
        attn_mask_type: Any = AttnMaskType.padding,
        *,
        layer_context: LayerContext | None = None,
        settings: ModelConfig | None = None,
    ):
        if [get_module(part) for part in vars(submodules).values()] != CROSS_ATTENTION_PARTS:
            raise NotImplementedError(
                "CrossAttention: custom submodules are not supported; give CrossAttentionSubmodules with its default "
                "parts"
            )
        model_config, place = of_process(config, layer_context, settings)
        super().__init__(model_config, layer_number - 1, place)
        self.config = config
        self.attn_mask_type = attn_mask_type
        self.layer_number = layer_number
        self.linear_proj.skip_bias_add = True

    @accepts_defaults_only(inference_params=None, rotary_pos_emb=None, packed_seq_params=None)
    def forward(
        self, hidden_states: Tensor, attention_mask: Tensor | None, key_value_states: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        return self.linear_proj(self.core_attn_out(hidden_states, key_value_states, attention_mask))


# Megatron's names.
__getattr__, __dir__ = lazy_names(__name__, {})
