"""Norms of queries and keys (QK norm).

They are over each head, with one weight or one for each head, or over all heads together.
"""

import torch
from torch import Tensor, nn

from megatron.core.ops.region_formula_helpers import widen
from megatron.core.parallel.rank_grid import Axis
from megatron.core.sharding.placement import Constant, Placement, Rows
from megatron.core.tensor_parallel import autograd_collectives
from megatron.core.tensor_parallel.linear_layers import TensorParallel
from megatron.core.transformer.layer_parallel_context import LayerContext
from megatron.core.transformer.model_config import ModelConfig
from megatron.core.transformer.norm import make_norm


class QKNorm(nn.Module):
    """Normalize heads, with a weight for each feature of each head.

    forward(x [s, b, n/t, d], mean_square [s, b] or None) -> the shape of x. mean_square: over all heads together; None:
    each head is normalized by its own. `weight` [n/t d] holds this rank's heads one after the other.
    """

    def __init__(self, config: ModelConfig, tp: TensorParallel, heads: int):
        """heads: of the whole layer. With fewer heads than ranks, neighbouring ranks share one."""
        super().__init__()
        self.epsilon = config.norm_epsilon
        self.weight_offset = int(config.apply_layernorm_1p)
        self.centered = config.normalization == "LayerNorm"
        self.width = config.head_width
        ranks = tp.axis.size
        copies = max(1, ranks // heads)  # neighbours that hold each head
        initial_values = {"weight": Constant(1.0 - self.weight_offset)}
        if self.centered and config.norm_bias:
            initial_values["bias"] = Constant(0.0)
        self.bias = None
        for name, initial_value in initial_values.items():
            if copies > 1:
                first = tp.axis.rank // copies * self.width
                rows = (Rows(first, first + self.width, shared_over=tp.kv.name),)
                local_size = self.width
                placement = Placement((heads * self.width,), initial_value, rows=rows)
            else:
                local_size = heads // ranks * self.width
                placement = Placement((heads * self.width,), initial_value, shard={tp.axis.name: 0})
            setattr(self, name, tp.parameter((local_size,), placement))

    def forward(self, x: Tensor, mean_square: Tensor | None = None) -> Tensor:
        wide = widen(x)  # float32 or wider
        if self.centered:
            wide = wide - wide.mean(dim=-1, keepdim=True)
        own_mean = mean_square is None
        mean = (
            wide.square().mean(dim=-1, keepdim=True) if own_mean else mean_square[..., None, None]
        )  # [s, b, n/t or 1, 1]
        factor = (widen(self.weight) + self.weight_offset).view(-1, self.width)  # [n/t, d]
        normed = wide * torch.rsqrt(mean + self.epsilon) * factor
        if self.bias is not None:
            normed = normed + widen(self.bias).view(-1, self.width)
        return normed.to(x.dtype)


QueryKeyNorms = tuple[nn.Module | None, nn.Module | None]


def make_qk_norms(config: ModelConfig, context: LayerContext) -> QueryKeyNorms:
    """Return the norms of queries and of keys by `--qk-layernorm` and `--qk-norm-over`; (None, None) without."""
    if not config.qk_layernorm:
        return None, None
    if config.qk_norm_over == "head":
        # The weight is whole on every rank, with a partial gradient: each rank normalizes its own heads only.
        q_norm = make_norm(config, context, width=config.head_width, partial=True)
        k_norm = make_norm(config, context, width=config.head_width, partial=True)
    else:
        q_norm = QKNorm(config, context.tp, config.num_attention_heads)
        k_norm = QKNorm(config, context.tp, config.query_groups)
    return q_norm, k_norm


def qk_norm(norms: QueryKeyNorms, q: Tensor, k: Tensor, axis: Axis | None) -> tuple[Tensor, Tensor]:
    """Normalize queries [s, b, n/t, d] and keys [s, b, groups/t, d]; the results have their shapes.

    axis: the ranks over whose heads together a mean is taken, all of which must call; None: each head by itself.
    """
    q_norm, k_norm = norms
    if axis is None:
        return q_norm(q), k_norm(k)
    q_mean, k_mean = _mean_squares(q, k, axis)
    return q_norm(q, q_mean), k_norm(k, k_mean)


def _mean_squares(q: Tensor, k: Tensor, axis: Axis) -> Tensor:
    """Return the mean square of each token's queries and of its keys, over the heads of all ranks: [2, s, b].

    Every rank of the axis must call. It costs an all-reduce of two numbers for each token, in both directions. A key
    head that several neighbours hold is counted equally often in the sum and in the number of features.
    """
    squares = torch.stack([widen(x).square().sum(dim=(-2, -1)) for x in (q, k)])  # [2, s, b]
    if axis.size > 1:
        # reduce alone has an identity for its backward; copy adds the ranks' gradients there
        squares = autograd_collectives.copy(autograd_collectives.reduce(squares, axis), axis)
    counts = [x.shape[-2] * x.shape[-1] * axis.size for x in (q, k)]
    return squares / torch.tensor(counts, dtype=squares.dtype, device=squares.device)[:, None, None]
