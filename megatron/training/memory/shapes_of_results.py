"""The results of operators on the meta device, whose shapes torch computes once.

torch computes many of them in Python, which took half of the time of a prediction of memory. The layers of a model repeat the
same operators with the same shapes.
"""

from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor


class _New(NamedTuple):
    """A result that has memory of its own."""

    shape: torch.Size
    strides: tuple[int, ...]
    dtype: torch.dtype


_Result = _New | int | None  # int: it is this one of the arguments, written in place


class ShapesOfResults:
    """Runs the operators that a `TorchDispatchMode` receives, on meta tensors, and remembers the shapes of their results.

    A view is not remembered: it shares the memory of an argument.
    """

    def __init__(self) -> None:
        self._known: dict[Any, tuple[_Result, ...]] = {}

    def run(self, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Return func(*args, **kwargs), as `__torch_dispatch__` does: a tensor of any shape, or several."""
        # a mode for torch functions has seen the caller's; here it would see each step of torch's own Python
        with torch._C.DisableTorchFunction():
            if not _makes_or_writes_tensors(func):
                return func(*args, **kwargs)
            tensors: list[Tensor] = []
            key = _key((func, args, tuple(kwargs.items())), tensors)
            if key is None or len({id(each) for each in tensors}) < len(
                tensors
            ):  # one in two places: which is the result?
                return func(*args, **kwargs)
            known = self._known.get(key)
            if known is not None:
                results = [_made(result, tensors) for result in known]
                return results[0] if len(results) == 1 else tuple(results)
            value = func(*args, **kwargs)
            found = _results(value if isinstance(value, tuple) else (value,), tensors)
            if found is not None and _key((func, args, tuple(kwargs.items())), []) == key:
                self._known[key] = found
            return value


@cache
def _makes_or_writes_tensors(func: Any) -> bool:
    """Return whether the results of an operator are new tensors, or arguments that it writes and whose shapes it keeps."""
    if torch.Tag.inplace_view in func.tags:
        return False
    of_schema = (*func._schema.arguments, *func._schema.returns)
    has_view = any(each.alias_info is not None and not each.alias_info.is_write for each in of_schema)
    return not has_view and all(str(each.type) == "Tensor" for each in func._schema.returns)


def _key(value: Any, tensors: list[Tensor]) -> Any:
    """Return what the shapes of results depend on in an argument, and append its tensors. None: it is not remembered."""
    if isinstance(value, Tensor):
        # without dimensions it may be a number, which counts for less in the choice of a dtype
        if not value.is_meta or value.dim() == 0:
            return None
        tensors.append(value)
        return value.shape, value.stride(), value.dtype
    if isinstance(value, tuple | list):
        keys = []
        for each in value:
            key = _key(each, tensors)
            if key is None:
                return None
            keys.append(key)
        return tuple(keys)
    return type(value), value  # 1, 1.0 and True are equal


def _results(values: Sequence[Any], tensors: list[Tensor]) -> tuple[_Result, ...] | None:
    """Return what is remembered of results; tensors: the arguments. None: one shares memory, or is a part of larger memory."""
    results: list[_Result] = []
    of_arguments = {id(each.untyped_storage()) for each in tensors}
    for value in values:
        place = next((i for i, each in enumerate(tensors) if each is value), None)
        if value is None or place is not None:
            results.append(place)
            continue
        new, memory = _New(value.shape, value.stride(), value.dtype), value.untyped_storage()
        if id(memory) in of_arguments:  # a view that its schema does not tell, such as aten::_unsafe_view
            return None
        if memory.nbytes() != _made(new, []).untyped_storage().nbytes() or value.storage_offset():
            return None
        results.append(new)
    return tuple(results)


def _made(result: _Result, tensors: list[Tensor]) -> Tensor | None:
    if isinstance(result, _New):
        return torch.empty_strided(result.shape, result.strides, dtype=result.dtype, device="meta")
    return None if result is None else tensors[result]
