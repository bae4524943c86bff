"""Cross-attention, as of a decoder to its encoder's output, with heads sharded over the tensor-parallel ranks."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from megatron.core.ops.attention.document_and_window_masks import HoldsTensors, Mask, tensors_of
from megatron.core.ops.attention.kv_cache import CrossAttentionCache, DecoderCache
from megatron.core.ops.count_flops_by_module import Flops, LayerInput, flops_of, further_flops
from megatron.core.parallel.zigzag_sequence_row_ranges import SequenceShard
from megatron.core.tensor_parallel.linear_layers import ColumnParallelLinear, RowParallelLinear, size_per_rank
from megatron.core.transformer.dot_product_attention import CoreAttention, core_attention_flops
from megatron.core.transformer.layer_parallel_context import LayerContext, MakePart
from megatron.core.transformer.model_config import ModelConfig


class ParallelCrossAttention(nn.Module):
    """Attention with queries from x, keys and values from another sequence; each rank of tp computes n/t heads.

    The fused key/value weight holds the heads one after the other, each as its key head and its value head.

    forward(x [s, b, h], memory [m, b, h], mask, cache) -> [s, b, h]; under sequence parallelism [s/t, b, h] and
    [m/t, b, h]. mask: bool [.., s or 1, m], True where attention is masked; None: all of the other sequence is seen.
    cache: of keys and values [m, b, n/t, d]; the first forward adds this layer's, further ones use them and need no
    memory. Every rank of tp, and those that share the samples, must call. Building it raises
    ValueError if groups differ from heads.
    Source: "Attention Is All You Need", Vaswani et al. 2017, section 3.2.3.
    """

    gives_hidden_states = True

    def __init__(self, config: ModelConfig, layer: int, context: LayerContext, *, make_core: MakePart = CoreAttention):
        super().__init__()
        n = config.num_attention_heads
        d = config.head_width
        if config.query_groups != n:
            raise ValueError(
                f"cross-attention: {config.query_groups} query groups for {n} heads are not supported; give as many "
                "groups as heads"
            )
        self.head_width = d
        self.heads = size_per_rank("--num-attention-heads", n, context.tp.axis)
        self.layer = layer
        self.rows = context.rows.within_layers
        options = {"tp": context.tp, "bias": config.add_bias_linear}
        self.linear_q = ColumnParallelLinear(config.hidden_size, n * d, init=config.init, **options)
        self.linear_kv = ColumnParallelLinear(
            config.hidden_size, 2 * n * d, init=config.init, interleaved=(d, d), **options
        )
        self.core_attention = make_core(config, layer, context)
        self.linear_proj = RowParallelLinear(n * d, config.hidden_size, init=config.output_init, **options)
        self.query_width = n * d  # of all ranks' query heads

    def forward(
        self, x: Tensor, memory: Tensor | None, mask: Tensor | None = None, cache: CrossAttentionCache | None = None
    ) -> Tensor:
        return self.linear_proj(self.core_attn_out(x, memory, mask, cache))[0]  # [s, b, h]

    def core_attn_out(
        self, x: Tensor, memory: Tensor | None, mask: Tensor | None = None, cache: CrossAttentionCache | None = None
    ) -> Tensor:
        """Return the attention of this rank's heads [s, b, n/t d], before the output projection.

        Arguments are those of forward. Every rank of tp must call.
        """
        q = self.linear_q(x)[0].unflatten(-1, (self.heads, self.head_width))  # [s, b, n/t, d]
        attention = AttentionToWholeText(self.core_attention, mask, self.rows)
        if cache is None:
            return attention.compute(q, *self._keys_and_values(memory))
        entries = () if cache.holds(self.layer) else self._keys_and_values(memory)
        return cache.attend(self.layer, q, entries, attention)

    def _keys_and_values(self, memory: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the keys and values of memory [m, b, h]: [m, b, n/t, d] each."""
        mixed_kv = self.linear_kv(memory)[0].unflatten(-1, (self.heads, 2, self.head_width))  # [m, b, n/t, 2, d]
        k, v = mixed_kv.unbind(3)
        return k, v

    def count_flops(self, x: LayerInput) -> Flops:
        memory = x.memory
        if memory is None:
            raise ValueError("cross-attention: the FLOPs of x.memory, the other sequence, are asked for without one")
        heads = x.after(self.linear_q, self.linear_kv)
        if memory.requires_grad:
            heads = replace(heads, requires_grad=True)
        flops = flops_of(self.linear_q, x) + flops_of(self.linear_kv, memory)
        flops += core_attention_flops(self.core_attention, heads, self.query_width)
        flops += flops_of(self.linear_proj, heads.after(self.core_attention))
        return flops + further_flops(self, x, (self.linear_q, self.linear_kv, self.core_attention, self.linear_proj))


@dataclass(frozen=True)
class AttentionToWholeText:
    """What a cache calls: a core attention that sees all of another sequence but for its mask (`kv_cache.py: LayerAttention`)."""

    core_attention: nn.Module
    mask: Tensor | None
    rows: SequenceShard
    window_left: None = None

    def over_whole_sequence(self) -> "AttentionToWholeText":
        return self

    def compute(self, q: Tensor, *entries: Tensor) -> Tensor:
        """Return the attention of q [s, b, n/t, d] over keys and values [m, b, n/t, d]: [s, b, n/t d]."""
        k, v = entries
        mask = self.mask
        if mask is None:
            # None would be causal; the mask has the columns of all ranks that share the samples
            mask = torch.zeros(1, 1, 1, self.rows.global_length(len(k)), dtype=torch.bool, device=q.device)
        return self.core_attention(q, k, v, mask)


@dataclass(frozen=True)
class CrossAttentionState(HoldsTensors):
    """The inputs of a decoder's attention, in place of a mask.

    self_attention_mask: of the decoder's own text. memory: the encoder's output, [s, b, h], or [s/t, b, h] under
    sequence parallelism; None once the cache has its keys and values. key_padding_mask: bool [b, 1, 1, s], True where
    the encoder's text is padding. cache: in generation.
    """

    self_attention_mask: Mask
    memory: Tensor | None
    key_padding_mask: Tensor
    cache: DecoderCache | None = None

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The tensors that layers share: of the mask, memory [s, b, h] and key_padding_mask [b, 1, 1, s]."""
        return (*tensors_of(self.self_attention_mask), self.memory, self.key_padding_mask)

    @property
    def kv_cache(self) -> CrossAttentionCache | None:
        return None if self.cache is None else self.cache.memory
