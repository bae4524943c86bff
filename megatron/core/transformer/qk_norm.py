"""Norms of queries and keys: over each head's width with one weight or one for each head, or over the width of all heads."""

import torch
from torch import Tensor, nn

from megatron.core.ops.region_formula_helpers import wide_of
from megatron.core.parallel.grid import Axis
from megatron.core.sharding.placement import Constant, Placement, Rows
from megatron.core.tensor_parallel import autograd_collectives
from megatron.core.tensor_parallel.linear_layers import TensorParallel
from megatron.core.transformer.layer_build_context import LayerContext
from megatron.core.transformer.model_config import ModelConfig
from megatron.core.transformer.norm import make_norm


class HeadsNorm(nn.Module):
    """forward(x [s, b, n/t, d], mean square [s, b] or None) -> the shape of x. weight: of all heads, one after the other.

    Without a mean square each head is normalized by its own.
    """

    def __init__(self, config: ModelConfig, tp: TensorParallel, heads: int):
        """heads: of the whole layer; with fewer than ranks, neighbours share one."""
        super().__init__()
        self.epsilon, self.plus = config.norm_epsilon, int(config.apply_layernorm_1p)
        self.centered = config.normalization == "LayerNorm"
        self.width, ranks = config.head_width, tp.axis.size
        copies = max(1, ranks // heads)  # of each head, on neighbours
        parameters = {"weight": Constant(1.0 - self.plus)}
        parameters |= {"bias": Constant(0.0)} if self.centered and config.norm_bias else {}
        self.bias = None
        for name, start in parameters.items():
            if copies > 1:
                first = tp.axis.rank // copies * self.width
                rows = (Rows(first, first + self.width, shared_over=tp.kv.name),)
                local, placement = self.width, Placement((heads * self.width,), start, rows=rows)
            else:
                local = heads // ranks * self.width
                placement = Placement((heads * self.width,), start, shard={tp.axis.name: 0})
            setattr(self, name, tp.parameter((local,), placement))

    def forward(self, x: Tensor, mean_square: Tensor | None = None) -> Tensor:
        wide = wide_of(x)
        wide = wide - wide.mean(dim=-1, keepdim=True) if self.centered else wide
        mean = wide.square().mean(dim=-1, keepdim=True) if mean_square is None else mean_square[..., None, None]
        normed = wide * torch.rsqrt(mean + self.epsilon) * (wide_of(self.weight) + self.plus).view(-1, self.width)
        return (normed if self.bias is None else normed + wide_of(self.bias).view(-1, self.width)).to(x.dtype)


QueryKeyNorms = tuple[nn.Module | None, nn.Module | None]


def make_query_key_norms(config: ModelConfig, context: LayerContext) -> QueryKeyNorms:
    """By --qk-layernorm and --qk-norm-over."""
    if not config.qk_layernorm:
        return None, None
    if config.qk_norm_over == "head":
        # Whole on every rank, with a partial gradient: each rank normalizes its own heads only.
        q, k = (make_norm(config, context, width=config.head_width, partial=True) for _ in range(2))
    else:
        q, k = (HeadsNorm(config, context.tp, heads) for heads in (config.num_attention_heads, config.query_groups))
    return q, k


def normed_heads(norms: QueryKeyNorms, q: Tensor, k: Tensor, over: Axis | None) -> tuple[Tensor, Tensor]:
    """Queries [s, b, n/t, d] and keys [s, b, groups/t, d], normalized. over: the ranks over whose heads a mean is taken;
    None:
    each head by itself."""
    of_q, of_k = norms
    if over is None:
        return of_q(q), of_k(k)
    mean_q, mean_k = _mean_squares(q, k, over)
    return of_q(q, mean_q), of_k(k, mean_k)


def _mean_squares(q: Tensor, k: Tensor, axis: Axis) -> Tensor:
    """[2, s, b], over the heads of all ranks, each of which calls: an all-reduce of two numbers for each token, both ways.

    A key head that several neighbours hold is counted as often in the sum as in the number.
    """
    squares = torch.stack([wide_of(x).square().sum(dim=(-2, -1)) for x in (q, k)])
    total = autograd_collectives.copy(autograd_collectives.reduce(squares, axis), axis) if axis.size > 1 else squares
    counts = [x.shape[-2] * x.shape[-1] * axis.size for x in (q, k)]
    return total / torch.tensor(counts, dtype=total.dtype, device=total.device)[:, None, None]
