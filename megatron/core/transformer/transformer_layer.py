"""One pre-norm transformer layer."""

from torch import Tensor, nn

from megatron.core.random import DropoutKeys, HiddenDropout
from megatron.core.tensor_parallel.layers import TensorParallel
from megatron.core.transformer.attention import ParallelAttention
from megatron.core.transformer.kv_cache import KeyValueCache
from megatron.core.transformer.mlp import ParallelMLP
from megatron.core.transformer.norm import make_norm
from megatron.core.transformer.transformer_config import TransformerConfig


class ParallelTransformerLayer(nn.Module):
    """x -> x + drop(attention(norm(x))), then x + drop(mlp(norm(x))).

    The sums have the dtype of x, the blocks that of their weights: with `--fp32-residual-connection` x is float32.
    `layer` counts from 0 over the whole model. forward(x [s, b, h] ([s/t, b, h] under sequence parallelism), mask, angles, cache).
    Per forward: two all-reduces of [s, b, h] over tp; under sequence parallelism two all-gathers and two reduce-scatters.
    """

    def __init__(self, config: TransformerConfig, layer: int, *, tp: TensorParallel, keys: DropoutKeys):
        super().__init__()
        norm, width, epsilon = config.normalization, config.hidden_size, config.norm_epsilon
        self.input_layernorm = make_norm(norm, width, epsilon, tp)
        self.self_attention = ParallelAttention(config, layer, tp=tp, keys=keys)
        self.attention_dropout = HiddenDropout(config.hidden_dropout, keys, "after attention", layer, tp.sequence_axis)
        self.pre_mlp_layernorm = make_norm(norm, width, epsilon, tp)
        self.mlp = ParallelMLP(config, tp=tp)
        self.mlp_dropout = HiddenDropout(config.hidden_dropout, keys, "after mlp", layer, tp.sequence_axis)

    def forward(
        self,
        x: Tensor,
        mask: Tensor | None = None,
        angles: Tensor | None = None,
        cache: KeyValueCache | None = None,
    ) -> Tensor:
        x = x + self.attention_dropout(self.self_attention(self.input_layernorm(x), mask, angles, cache))
        return x + self.mlp_dropout(self.mlp(self.pre_mlp_layernorm(x)))
