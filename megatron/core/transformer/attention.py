"""Self-attention with its heads divided over the tensor-parallel ranks."""

from torch import Tensor, nn

from megatron.core.placement import Normal
from megatron.core.random import AttentionDropout, DropoutKeys
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear, TensorParallel, divide
from megatron.core.transformer.core_attention import CoreAttention
from megatron.core.transformer.norm import make_norm
from megatron.core.transformer.rotary import apply_rotary
from megatron.core.transformer.transformer_config import TransformerConfig


class ParallelAttention(nn.Module):
    """Multi-head or grouped-query self-attention: each rank computes n/t query heads and their groups/t key/value heads.

    The fused q/k/v weight holds the groups one after the other, each as its query heads, one key head, one value head:

        group 0: q0 q1 k v | group 1: q2 q3 k v | ...          rows [groups * (n / groups + 2) * d]

    With `qk_layernorm` each query and key head is normalized over its width.

    forward(x [s, b, h] ([s/t, b, h] under sequence parallelism), mask, angles [s, width / 2]) -> the same shape as x.
    """

    def __init__(self, config: TransformerConfig, layer: int, *, tp: TensorParallel, keys: DropoutKeys):
        super().__init__()
        n, groups, d = config.num_attention_heads, config.query_groups, config.head_width
        heads = divide("--num-attention-heads", n, tp.axis)
        self.groups = divide("--num-query-groups", groups, tp.axis)
        self.heads_per_group, self.head_width = n // groups, d
        self.linear_qkv = ColumnParallelLinear(
            config.hidden_size, (n + 2 * groups) * d,
            tp=tp, init=Normal(config.init_method_std), bias=config.add_bias_linear or config.add_qkv_bias,
        )  # fmt: skip
        self.q_layernorm = self.k_layernorm = None
        if config.qk_layernorm:
            # Whole on every rank, yet each rank sees only its own heads, with and without sequence parallelism.
            self.q_layernorm, self.k_layernorm = (
                make_norm(config.normalization, d, config.norm_epsilon, tp, partial=True) for _ in range(2)
            )
        self.core_attention = CoreAttention(
            config.attention_backend,
            AttentionDropout(config.attention_dropout, keys, layer, first_head=tp.axis.rank * heads),
        )
        self.linear_proj = RowParallelLinear(
            n * d, config.hidden_size, tp=tp, init=Normal(config.output_init_std), bias=config.add_bias_linear
        )

    def forward(self, x: Tensor, mask: Tensor | None = None, angles: Tensor | None = None) -> Tensor:
        q, k, v = self.project(x)
        if self.q_layernorm is not None:
            q, k = self.q_layernorm(q), self.k_layernorm(k)
        if angles is not None:
            q, k = apply_rotary(q, angles), apply_rotary(k, angles)
        out, _ = self.linear_proj(self.core_attention(q, k, v, mask))
        return out

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The queries [s, b, n/t, d], keys and values [s, b, groups/t, d] of this rank."""
        fused, _ = self.linear_qkv(x)
        s, b, _ = fused.shape
        fused = fused.view(s, b, self.groups, self.heads_per_group + 2, self.head_width)
        q, k, v = fused.split([self.heads_per_group, 1, 1], dim=3)
        return q.flatten(2, 3), k.flatten(2, 3), v.flatten(2, 3)
