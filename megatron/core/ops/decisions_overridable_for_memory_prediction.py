"""Decisions of layers that a `torch.overrides.TorchFunctionMode` may replace, as it may any function of torch.

Such a function computes no tensor from another, since a mode is off inside the functions that it calls.
"""

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from torch import Tensor
from torch.overrides import wrap_torch_function

T = TypeVar("T")
overridable = wrap_torch_function(lambda *_, **__: (None,))  # by modes alone: no argument is a tensor that overrides


@overridable
def blocks_to_compute(blocks: Iterable[T], size: Callable[[T], int]) -> Iterable[T]:
    """Return the blocks that a loop computes one after the other; none leaves memory behind.

    size: elements of a block.
    """
    return blocks


@overridable
def row_counts(counts: Tensor, total: int, at_most: Any = None) -> Any:
    """Return numbers of rows, int64 of any shape, as nested lists. They wait for the device, and add up to `total`.

    A mode without values, as in a prediction of memory, gives `at_most`, nested lists of the same shape: the rows that a
    layer may receive at the most, which it knows. None: it spreads `total` rows evenly.
    """
    return counts.tolist()


@overridable
def checkpoint_determinism_check() -> str:
    """Return the `determinism_check` of torch.utils.checkpoint.checkpoint.

    It says what torch compares of recomputed tensors.
    """
    return "default"
