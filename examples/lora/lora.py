"""Low-rank adapters (LoRA, arXiv:2106.09685) on every parallel linear of a model, which stays as it is.

    y = W x + (alpha / rank) B (A x)        A [rank, in] drawn, B [out, rank] zero at first; W and everything else frozen

Each adapter is split as its linear is: of a column-parallel linear B is split by rows, of a row-parallel one A by columns.
"""

from torch import Tensor, nn

from megatron.core.ops.count_flops_by_module import Flops, LayerInput, weight_flops
from megatron.core.sharding.placement import Constant, Normal
from megatron.core.tensor_parallel import autograd_collectives
from megatron.core.tensor_parallel.exchange_parallel_linears_for_adapters import (
    input_parameter,
    output_parameter,
    replace_linears,
)
from megatron.core.tensor_parallel.linear_layers import ColumnParallelLinear, RowParallelLinear


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
        # A [rank, in], of a row-parallel linear [rank, in/t]; B [out, rank], of a column-parallel one [out/t, rank]
        self.lora_a = input_parameter(linear, rank, init=Normal(0.02))
        self.lora_b = output_parameter(linear, rank, init=Constant(0.0))

    def with_delta(self, x: Tensor, delta: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the linear's result for x, with the scaled delta added to its first part."""
        y, bias = self.linear(x)
        return y + self.scale * delta, bias

    def count_flops(self, x: LayerInput) -> Flops:
        """A frozen weight has no gradient, and the first layer's frozen input needs none."""
        low_rank = x.after(self.lora_a)  # what B reads
        return weight_flops(x, self.weight) + weight_flops(x, self.lora_a) + weight_flops(low_rank, self.lora_b)


class ColumnLoRA(LoRA):
    """x [s, b, in] ([s/t, b, in] under sequence parallelism) -> [s, b, out/t]"""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        h = self.tp.linear(x, self.lora_a)  # [s, b, rank], or [s/t, b, rank]
        return self.with_delta(x, self.tp.column_linear(h, self.lora_b))


class RowLoRA(LoRA):
    """y [s, b, in/t] -> [s, b, out], or [s/t, b, out] under sequence parallelism"""

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
