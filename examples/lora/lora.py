"""Low-rank adapters (LoRA, arXiv:2106.09685) on every parallel linear of a model, which stays as it is.

    y = W x + (alpha / rank) B (A x)        A [rank, in] drawn, B [out, rank] zero at first; W and everything else frozen

Each adapter is split as its linear is: of a column-parallel linear B is split by rows, of a row-parallel one A by columns.
"""

import torch
from torch import Tensor, nn

from megatron.core.sharding.placement import Constant, Normal, Placement
from megatron.core.tensor_parallel import autograd_collectives
from megatron.core.tensor_parallel.linear_layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.replace_parallel_linears import replace_linears


class LoRA(nn.Module):
    """A linear with an adapter. forward: as the linear's."""

    def __init__(self, linear: ColumnParallelLinear | RowParallelLinear, rank: int, alpha: float):
        super().__init__()
        self.weight = linear.weight  # by the linear's names
        self.bias = linear.bias
        self.matmul_state = linear.matmul_state  # of a MatmulBackend
        object.__setattr__(self, "linear", linear)  # no submodule: it would give its parameters a second name
        self.tp = linear.tp
        self.scale = alpha / rank

    def factor(self, shape: tuple[int, ...], placement: Placement) -> nn.Parameter:
        """Return a parameter with this rank's part, in the weight's dtype and on its device."""
        parameter = nn.Parameter(torch.empty(shape, dtype=self.weight.dtype, device=self.weight.device))
        parameter.placement = placement
        return parameter

    def with_delta(self, x: Tensor, delta: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the linear's result for x, with the scaled delta added to its first part."""
        y, bias = self.linear(x)
        return y + self.scale * delta, bias


class ColumnLoRA(LoRA):
    """x [s, b, in] ([s/t, b, in] under sequence parallelism) -> [s, b, out/t]"""

    def __init__(self, linear: ColumnParallelLinear, rank: int, alpha: float):
        super().__init__(linear, rank, alpha)
        of_weight = linear.weight.placement
        partial = (self.tp.axis.name,) if self.tp.sequence_parallel else ()
        shape = (rank, of_weight.shape[1])
        placement = Placement(shape, Normal(0.02), replicated_over=(self.tp.axis.name,), partial_grad=partial)
        self.lora_a = self.factor(shape, placement)
        rows = Placement(
            (of_weight.shape[0], rank),
            Constant(0.0),
            shard=of_weight.shard,
            blocks=of_weight.blocks,
            rows=of_weight.rows,
            interleaved=of_weight.interleaved,
        )
        self.lora_b = self.factor((linear.weight.shape[0], rank), rows)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        h = self.tp.linear(x, self.lora_a)  # [s, b, rank], or [s/t, b, rank]
        return self.with_delta(x, self.tp.column_linear(h, self.lora_b))


class RowLoRA(LoRA):
    """y [s, b, in/t] -> [s, b, out], or [s/t, b, out] under sequence parallelism"""

    def __init__(self, linear: RowParallelLinear, rank: int, alpha: float):
        super().__init__(linear, rank, alpha)
        out, size = linear.weight.placement.shape
        axis = self.tp.axis.name
        columns = Placement((rank, size), Normal(0.02), shard={axis: 1})
        self.lora_a = self.factor((rank, linear.weight.shape[1]), columns)
        partial = (axis,) if self.tp.sequence_parallel else ()
        whole = Placement((out, rank), Constant(0.0), replicated_over=(axis,), partial_grad=partial)
        self.lora_b = self.factor((out, rank), whole)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        h = self.tp.linear(x, self.lora_a)  # [s, b, rank], this rank's term of a sum
        if self.tp.sequence_parallel:
            h = autograd_collectives.reduce_scatter_sequence(h, self.tp.axis)  # [s/t, b, rank]
        else:
            h = autograd_collectives.reduce(h, self.tp.axis)
        return self.with_delta(x, self.tp.linear(h, self.lora_b))


def add_lora(chunk: nn.Module, rank: int = 8, alpha: float = 16.0, *, output_layer: bool = False) -> list[str]:
    """Freeze a model chunk and give each of its parallel linears an adapter; return the linears' names.

    output_layer: also that of an output layer with a weight of its own.
    """
    for parameter in chunk.parameters():
        parameter.requires_grad_(False)

    def make(name: str, linear: ColumnParallelLinear | RowParallelLinear) -> nn.Module:
        kind = ColumnLoRA if isinstance(linear, ColumnParallelLinear) else RowLoRA
        return kind(linear, rank, alpha)

    return replace_linears(chunk, make, output_layer=output_layer)
