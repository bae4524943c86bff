"""Decisions that a mode (`torch.overrides.TorchFunctionMode`) may take otherwise, as it may replace any function of torch's.

Such a function computes with no tensor: a mode is off inside of what it passes on.
"""

from collections.abc import Callable, Iterable
from typing import TypeVar

from torch.overrides import wrap_torch_function

T = TypeVar("T")
overridable = wrap_torch_function(lambda *_, **__: (None,))  # modes alone: no tensor is looked at


@overridable
def blocks_to_compute(blocks: Iterable[T], size: Callable[[T], int]) -> Iterable[T]:
    """The blocks that a loop computes one after the other, none of which leaves memory behind. size: of a block, in elements."""
    return blocks


@overridable
def determinism_check() -> str:
    """What torch compares of recomputed tensors: the `determinism_check` of torch.utils.checkpoint.checkpoint."""
    return "default"
