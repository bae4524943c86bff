"""Attention of one sequence to another, as a decoder's to its encoder; heads sharded over the tensor-parallel ranks."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from megatron.core.ops.attention.kv_cache import DecoderCache
from megatron.core.ops.attention.masks import HoldsTensors, Mask, tensors_of
from megatron.core.tensor_parallel.linear_layers import ColumnParallelLinear, RowParallelLinear, size_per_rank
from megatron.core.transformer.dot_product_attention import CoreAttention
from megatron.core.transformer.layer_build_context import LayerContext, MakePart
from megatron.core.transformer.model_config import ModelConfig


class ParallelCrossAttention(nn.Module):
    """Queries from x, keys and values from another sequence; each rank computes n/t heads.

    The fused key/value weight holds the heads one after the other, each as its key head and its value head.
    forward(x [s, b, h], memory [m, b, h], mask, kept) -> [s, b, h]. mask: bool [.., s or 1, m], True where attention is
    masked;
    None: all of the other sequence is seen. kept: layer -> keys and values; the first forward adds its own, further ones
    use them
    and need no memory. Source: "Attention Is All You Need", Vaswani et al. 2017, section 3.2.3.
    """

    gives_hidden_states = True

    def __init__(self, config: ModelConfig, layer: int, context: LayerContext, *, make_core: MakePart = CoreAttention):
        super().__init__()
        n, d = config.num_attention_heads, config.head_width
        if config.query_groups != n:
            raise ValueError(f"attention to another sequence: {config.query_groups} groups of {n} heads are not built")
        self.head_width, self.heads = d, size_per_rank("--num-attention-heads", n, context.tp.axis)
        options = {"tp": context.tp, "init": config.init, "bias": config.add_bias_linear}
        self.linear_q = ColumnParallelLinear(config.hidden_size, n * d, **options)
        self.linear_kv = ColumnParallelLinear(config.hidden_size, 2 * n * d, interleaved=(d, d), **options)
        self.layer = layer
        self.core_attention, self.rows = make_core(config, layer, context), context.rows.within_layers
        of_output = options | {"init": config.output_init}
        self.linear_proj = RowParallelLinear(n * d, config.hidden_size, **of_output)

    def forward(
        self, x: Tensor, memory: Tensor | None, mask: Tensor | None = None, kept: "Kept | None" = None
    ) -> Tensor:
        return self.linear_proj(self.attended(x, memory, mask, kept))[0]

    def attended(
        self, x: Tensor, memory: Tensor | None, mask: Tensor | None = None, kept: "Kept | None" = None
    ) -> Tensor:
        """[s, b, n/t d]: the heads' results, before the output layer."""
        q = self.linear_q(x)[0].unflatten(-1, (self.heads, self.head_width))
        k, v = self._keys_and_values(memory, kept)
        if mask is None:
            mask = torch.zeros(1, 1, 1, self.rows.length_of(len(k)), dtype=torch.bool, device=q.device)
        return self.core_attention(q, k, v, mask)

    def _keys_and_values(self, memory: Tensor | None, kept: "Kept | None") -> tuple[Tensor, Tensor]:
        if kept is not None and self.layer in kept:
            return kept[self.layer]
        k, v = self.linear_kv(memory)[0].unflatten(-1, (self.heads, 2, self.head_width)).unbind(3)
        if kept is not None:
            kept[self.layer] = k, v
        return k, v


Kept = dict[int, tuple[Tensor, Tensor]]  # layer -> keys, values [m, b, n/t, d]


@dataclass(frozen=True)
class BesideEncoder(HoldsTensors):
    """In place of a mask: what a decoder's layers see.

    own: of the decoder's own text. memory: the encoder's result, [s, b, h], or [s/t, b, h] under sequence parallelism;
    None once
    the cache has what was made of it. hidden: [b, 1, 1, s], True where the encoder's text is padding. cache: in generation.
    """

    own: Mask
    memory: Tensor | None
    hidden: Tensor
    cache: DecoderCache | None = None

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return (*tensors_of(self.own), self.memory, self.hidden)

    @property
    def kept(self) -> Kept | None:
        return None if self.cache is None else self.cache.memory
