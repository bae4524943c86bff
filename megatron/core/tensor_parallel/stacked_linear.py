"""Linears of experts that are stacked in one weight: what an adapter of them needs to know, whoever builds the experts."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from megatron.core.parallel.rank_grid import Axis
from megatron.core.sharding.placement import InitialValue, Placement
from megatron.core.tensor_parallel.linear_layers import TensorParallel


class StackedLinear(nn.Module):
    """A linear of each expert, for the rows of each. `replace_linears` may exchange it.

    weight: [E, .., in] of this rank, whose dimensions between make up the output, such as [E, 2, f, h] of gate and up; its
    placement has at most one axis for a dimension. axes: those that shard it, by name.

    forward(x [rows, in], counts: the rows of each expert here, wgrads) -> [rows, out]. wgrads: takes the weight gradients if
    this is not the last of several calls in the backward, see `ExpertRows`. It is handed to every `product` of the call, and
    no parameter has two of them: `num_grads_per_backward` counts the last call alone.
    """

    weight: nn.Parameter
    bias: nn.Parameter | None
    tp: TensorParallel
    axes: Mapping[str, Axis]

    def forward(self, x: Tensor, counts: Sequence[int], wgrads: Any = None, **options: Any) -> Tensor:
        raise NotImplementedError

    def product(self, x: Tensor, weight: Tensor, counts: Sequence[int], wgrads: Any = None) -> Tensor:
        """Return the product of each expert's rows with its matrix: x [rows, in], weight [E, .., in] -> [rows, out]."""
        raise NotImplementedError

    def input_parameter(self, rank: int, *, init: InitialValue) -> nn.Parameter:
        """Make a parameter [E, rank, in], of which a rank has the part of its experts' input.

        An axis that shards the output gives each of its ranks a copy, whose gradients are terms of a sum. init: of each
        expert's matrix.
        """
        last = self.weight.dim() - 1
        return self._parameter({0: 0, last: 2}, rank, init)

    def output_parameter(self, rank: int, *, part: int | None = None, init: InitialValue) -> nn.Parameter:
        """Make a parameter [E, .., rank], of which a rank has the part of its experts' output; or [E, rows, rank] of one of the
        parts that dimension 1 counts.

        An axis that shards the input gives each of its ranks a copy, whose gradients are terms of a sum. init: of each
        expert's matrix.
        """
        between = range(1 if part is None else 2, self.weight.dim() - 1)
        return self._parameter({dim: place for place, dim in enumerate((0, *between))}, rank, init)

    def _parameter(self, places: Mapping[int, int], rank: int, init: InitialValue) -> nn.Parameter:
        """places: dimension of the weight -> that of the parameter; the one that is left is of size `rank`."""
        of_weight = self.weight.placement
        whole = [rank] * (len(places) + 1)
        local = list(whole)
        for dim, place in places.items():
            whole[place] = of_weight.shape[dim]
            local[place] = self.weight.shape[dim]
        shard = {name: places[dim] for name, dim in of_weight.shard.items() if dim in places}
        copies = tuple(name for name, dim in of_weight.shard.items() if dim not in places)
        placement = Placement(
            tuple(whole),
            init,
            shard=shard,
            replicated_over=copies,
            partial_grad=copies,
            reduce_over=of_weight.reduce_over,
            init_per_matrix=True,
        )
        parameter = self.tp.parameter(tuple(local), placement, tuple(self.axes.values()))
        parameter.num_grads_per_backward = 1  # the terms of several calls count as one
        return parameter
