"""Low-rank adapters on the stacked linears of experts: a pair (A_e, B_e) of each expert, or one for each part of its gate|up.

    y = W_e x + scale B_e (A_e x) for the rows x of expert e        lora_a [E, rank, in], lora_b [E, .., rank]

A pair is divided as its weight is: the experts over ep; over etp the rows of B of a linear whose output etp divides, the
columns of A of one whose input it divides. The other factor is whole on the ranks of etp, whose gradients of it are terms of a
sum. Nothing is communicated besides: a rank's results are terms, as those of its experts are.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from megatron.core.ops.count_flops_by_module import Flops, LayerInput, flops_of, weight_flops
from megatron.core.peft.adapter_products import FusedRows
from megatron.core.peft.adapters import Adapted, Adapter, GivenValues, kaiming_uniform
from megatron.core.peft.lora_config import PARTS, WHOLE
from megatron.core.sharding.placement import Constant
from megatron.core.tensor_parallel.stacked_linear import StackedLinear


class StackedLoRA(Adapted):
    """A stacked linear with adapters of its experts: x [rows, in], counts -> [rows, out]"""

    def __init__(self, linear: StackedLinear, adapters: dict[str, Adapter]):
        super().__init__(linear, adapters, linear.axes)
        self.rows = self.rows_of(linear)
        for part, adapter in adapters.items():
            number = None if part == WHOLE else list(self.rows.sizes).index(part)
            a = linear.input_parameter(adapter.rank, init=kaiming_uniform)
            self.add_pair(part, a, linear.output_parameter(adapter.rank, part=number, init=Constant(0.0)))

    @staticmethod
    def rows_of(linear: StackedLinear) -> FusedRows:
        """Return the parts of an expert's rows on this rank: gate|up, or one."""
        gated = PARTS["linear_fc1"]
        between = linear.weight.shape[1:-1]  # [2, f] of gate and up
        if len(between) == 2 and between[0] == len(gated):
            return FusedRows(dict.fromkeys(gated, between[1]), 1)
        return FusedRows({WHOLE: math.prod(between)}, 1)

    def forward(self, x: Tensor, counts: Sequence[int], wgrads: Any = None, **options: Any) -> Tensor:
        deltas = {}
        for part, adapter, a, b in self.pairs():
            h = self.linear.product(x, a, counts, wgrads)  # [rows, rank]
            deltas[part] = self.linear.product(adapter.scale * h, b, counts, wgrads)
        return with_deltas(self.linear(x, counts, wgrads, **options), self.rows, deltas)

    def count_flops(self, x: LayerInput) -> Flops:
        """x: whose tokens are rows, of whichever experts."""
        flops = flops_of(self.linear, x)
        for _, _, a, b in self.pairs():
            flops = (
                flops + weight_flops(x, a, per_token=_per_row(a)) + weight_flops(x.after(a), b, per_token=_per_row(b))
            )
        return flops


class GivenStackedLoRA(GivenValues, StackedLoRA):
    """A `StackedLoRA` that begins with given values."""


def _per_row(factor: Tensor) -> int:
    """Multiplications of a row with its expert's factor, [E, .., ..]."""
    return math.prod(factor.placement.shape[1:])


class AddToParts(torch.autograd.Function):
    """y with a term added to the rows of some parts of a fused linear, in one pass over y."""

    @staticmethod
    def forward(ctx, y: Tensor, rows: FusedRows, names: tuple[str, ...], *terms: Tensor) -> Tensor:
        """y: [.., out/t]; terms: of the parts `names`, [.., rows of the part on this rank] -> [.., out/t]"""
        ctx.rows = rows
        ctx.names = names
        of_part = dict(zip(names, terms))
        total = torch.empty_like(y)
        for part, source, target in zip(rows.sizes, rows.split(y), rows.split(total)):
            if part in of_part:
                torch.add(source, of_part[part].unflatten(-1, (rows.groups, rows.sizes[part])), out=target)
            else:
                target.copy_(source)
        return total

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:
        """grad: [.., out/t] -> (of y: the same; of each term: its rows). Nothing is saved."""
        of_part = dict(zip(ctx.rows.sizes, ctx.rows.split(grad)))
        return grad, None, None, *(of_part[name].flatten(-2) for name in ctx.names)


def with_deltas(y: Tensor, rows: FusedRows, deltas: Mapping[str, Tensor]) -> Tensor:
    """Return a linear's result y [.., out/t] with deltas added to the rows of their parts: part -> [.., rows of the part]."""
    if WHOLE in deltas:
        return y + deltas[WHOLE]
    return AddToParts.apply(y, rows, tuple(deltas), *deltas.values())
