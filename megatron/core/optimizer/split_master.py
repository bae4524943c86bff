"""An fp32 master stored as the bf16 weight that the model reads and a signed 16-bit residual.

It saves 2 bytes a parameter.

    bits of the master, an int32    =    65536 x bits of the weight, an int16    +    residual, -32768 .. 32767

The weight is the master rounded to nearest, ties to even, as in a run with separate masters. 65,537 masters round to
an even weight, one more than 16 bits can tell apart: the weight itself, 32,767 on each side, and a tie at each end. So
the tie farther from zero is broken before it is stored: the master moves one unit in the last place towards zero, and
still rounds to the same weight.

    lower half of the master    8000 after an odd upper half    residual -32768    rounds up, kept exactly
                                8000 after an even upper half   residual  32767    rounds down, kept as 7FFF

That affects one master in 131,072, by chance. Every other master is restored to the bit, and a broken tie is not
broken again. A finite master too large for bf16 has an infinite weight, as with any rounding, and is restored exactly.
The weight of a NaN is a NaN; its payload is lost.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from megatron.core.base.async_handle import AsyncHandle, all_of
from megatron.core.offload.tensor_in_memory_or_file import Stored, StoredTensor, start_reading, start_writing

_NAN = 0x7FC00000  # its lower half is zero; NVIDIA's NaN, 0x7FFFFFFF, would round to minus zero


def split_master(master: Tensor) -> tuple[Tensor, Tensor]:
    """Return (weight in bfloat16, residual in int16) of a float32 master, of any shape; both have its shape."""
    bits = master.view(torch.int32).masked_fill(master.isnan(), _NAN)
    bits.sub_(bits.bitwise_and(0x1FFFF).eq_(0x8000))  # ties that round towards zero
    residual = bits.to(torch.int16)  # the lower half, as a signed number
    weight = bits.sub_(residual).bitwise_right_shift_(16).to(torch.int16)
    return weight.view(torch.bfloat16), residual


def join_master(weight: Tensor, residual: Tensor) -> Tensor:
    """Return the float32 master of a weight and its residual, bfloat16 and int16 of one shape, which it has too.

    It is on the weight's device, in new memory.
    """
    bits = weight.view(torch.int16).to(torch.int32).bitwise_left_shift_(16)
    return bits.add_(residual.to(bits.device)).view(torch.float32)


class SplitMaster(StoredTensor):
    """A float32 tensor whose upper half is the weight: writing to it writes the weight."""

    dtype = torch.float32

    def __init__(self, weight: Stored, residual: Stored):
        self.weight = weight
        self.residual = residual
        self.shape = tuple(weight.shape)

    def view(self, shape: tuple[int, ...]) -> "SplitMaster":
        """Return the same elements in another shape, of as many elements."""
        return SplitMaster(self.weight.view(shape), self.residual.view(shape))

    def __getitem__(self, rows: slice) -> "SplitMaster":
        """Return consecutive rows of the first dimension, as a view: [rows, ..]."""
        return SplitMaster(self.weight[rows], self.residual[rows])

    def start_reading(self, start: Callable[[Stored], AsyncHandle[Tensor]] = start_reading) -> AsyncHandle[Tensor]:
        """Start to read the master; `wait` returns it, float32 [shape].

        start: the function that starts to read each half.
        """
        weight = start(self.weight)
        residual = start(self.residual)
        return AsyncHandle(lambda: join_master(weight.wait(), residual.wait()))

    def start_writing(self, values: Tensor) -> AsyncHandle[Any]:
        """Start to write both halves of these masters [shape], of any floating dtype."""
        weight, residual = split_master(values.detach().float().contiguous())
        return all_of([start_writing(self.weight, weight), start_writing(self.residual, residual)])
