"""What all adapters share: their pairs (A, B), by the parts of a linear, and where those begin."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from torch import Tensor, nn

from megatron.core.parallel.rank_grid import Axis
from megatron.core.sharding.boxes import slices
from megatron.core.sharding.initial_values import InitializesFromWeights
from megatron.core.sharding.placement import pieces
from megatron.core.tensor_parallel.exchange_parallel_linears_for_adapters import ParallelLinear
from megatron.core.tensor_parallel.stacked_linear import StackedLinear


def kaiming_uniform(x: Tensor) -> Tensor:
    """PEFT's and litgpt's first values of A: uniform within 1 / sqrt(in)."""
    return nn.init.kaiming_uniform_(x, a=math.sqrt(5))


@dataclass(frozen=True)
class Adapter:
    """One pair (A, B). values: (A [rank, in], B [out, rank]) of the whole pair, in the rows' order of the part; None: new.

    Of experts: A [E, rank, in], B [E, .., rank].
    """

    rank: int
    scale: float
    values: tuple[Tensor, Tensor] | None = None


class Adapted(nn.Module):
    """A linear with adapters. forward: as the linear's.

    Parameters beside the linear's own: `lora_a` and `lora_b`, or `lora_a_PART` and `lora_b_PART` for each part. `axes`: those
    that shard them, by name.
    """

    def __init__(self, linear: ParallelLinear | StackedLinear, adapters: dict[str, Adapter], axes: Mapping[str, Axis]):
        super().__init__()
        self.weight = linear.weight  # by the linear's names
        self.bias = linear.bias
        vars(self).update(linear=linear)  # no submodule: it would give its parameters a second name
        self.tp = linear.tp
        self.adapters = adapters  # by part
        self.axes = axes
        self.suffixes = {part: f"_{part}" if part else "" for part in adapters}

    def add_pair(self, part: str, a: nn.Parameter, b: nn.Parameter) -> None:
        """Register (A, B) of a part."""
        suffix = self.suffixes[part]
        self.register_parameter(f"lora_a{suffix}", a)
        self.register_parameter(f"lora_b{suffix}", b)

    def pair(self, part: str) -> tuple[nn.Parameter, nn.Parameter]:
        """Return (A, B) of a part, as this rank has them."""
        suffix = self.suffixes[part]
        return getattr(self, f"lora_a{suffix}"), getattr(self, f"lora_b{suffix}")

    def pairs(self) -> Iterator[tuple[str, Adapter, nn.Parameter, nn.Parameter]]:
        """Yield (part, adapter, A, B) of each part."""
        for part, adapter in self.adapters.items():
            yield part, adapter, *self.pair(part)


class GivenValues(InitializesFromWeights):
    """Adapters that begin with given values, such as those of a PEFT folder, instead of drawn ones."""

    def initialize_from_weights(self) -> None:
        for _, adapter, *pair in self.pairs():
            for parameter, whole in zip(pair, adapter.values or ()):
                for box, local in pieces(parameter.placement, tuple(parameter.shape), self.axes):
                    parameter.data[slices(local)].copy_(whole[slices(box)])
