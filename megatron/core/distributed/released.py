"""What a parameter, or a `main_grad`, is while its values are elsewhere: it has a shape and a name, and says so when
these are asked for.

One whose memory is released changes its class to `ReleasedParameter` (stage 3) or `ReleasedGradient` (2 and 3) and
back: torch then calls `__torch_function__` before it touches the memory, which would else end the process. That costs
an assignment where memory comes and goes, and nothing where it is there.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

_SHARES_MEMORY = {"data", "T", "mT", "H", "mH", "real", "imag"}  # properties that are the values
_MAY_BE_SET = {"grad", "requires_grad"}
_LAYOUT = {"size", "numel", "nelement", "dim", "ndimension", "stride", "is_contiguous", "__len__"}
_KIND = {"is_floating_point", "is_complex", "element_size", "get_device", "__hash__"}
_HOOKS = {"requires_grad_", "register_hook", "register_post_accumulate_grad_hook"}
_NEED_NO_VALUES = _LAYOUT | _KIND | _HOOKS


class _Away:
    """A tensor without its values: whatever needs them is said to `asked` first."""

    __slots__ = ()  # so that a tensor can become one, and be itself again

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if not _needs_no_values(func):
            held = [x for x in _flat((*args, *(kwargs or {}).values())) if isinstance(x, cls)]
            if (instead := cls.asked(getattr(func, "__name__", ""), held)) is not None:
                return instead
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @staticmethod
    def asked(function: str, held: list[Any]) -> str | None:
        """`function` is about to use these. What to answer in its place; None to let it."""
        raise NotImplementedError


class ReleasedParameter(_Away, nn.Parameter):
    """A parameter without its values. What is known without them can be asked for; everything else is an error with its
    name."""

    @staticmethod
    def asked(function: str, held: list[Any]) -> str | None:
        if function == "__repr__":
            return f"ReleasedParameter({_name_of(held)}, {tuple(held[0].shape)})"
        raise RuntimeError(
            f"{_name_of(held)} is used while ZeRO stage 3 has released it: a rank has its values only while the module that "
            "holds it runs. Compute with it inside that module's forward, or pass the parameter to a module without "
            "children as an argument of its forward, or use --zero-stage 2. To read all weights, save a checkpoint"
        )


class ArrivingParameter(_Away, nn.Parameter):
    """A parameter whose updated values are on their way, in stages 1 and 2: who asks for them waits, be it outside the
    forward of the module that holds it, for which a hook waits."""

    @staticmethod
    def asked(function: str, held: list[Any]) -> None:
        for parameter in held:
            parameter.slot.bucket.finish_gather()


class ReleasedGradient(_Away, Tensor):
    """A `main_grad` without its values, likewise."""

    @staticmethod
    def asked(function: str, held: list[Any]) -> str | None:
        raise RuntimeError(
            f"main_grad of {_name_of(held)} is used while ZeRO stage 2 or 3 has released it: a rank has it only from its "
            "first gradient of a microbatch until it is summed over the ranks. To add to it, call "
            "megatron.core.main_grad.open_main_grad(parameter) first; to look at gradients, use --zero-stage 1"
        )


_FAMILIES = ({nn.Parameter, ReleasedParameter, ArrivingParameter}, {Tensor, ReleasedGradient})


def become(kind: type, tensors: Iterable[Tensor]) -> None:
    """From now on these say what `kind` says: nn.Parameter and Tensor that their values are there. A tensor of a class
    of its own is left as it is."""
    family = next(family for family in _FAMILIES if kind in family)
    for tensor in tensors:
        if type(tensor) in family:
            tensor.__class__ = kind


def _name_of(held: list[Any]) -> str:
    return held[0].slot.name if held and hasattr(held[0], "slot") else "a parameter"


def _needs_no_values(func: Any) -> bool:
    what, of = getattr(func, "__name__", ""), getattr(getattr(func, "__self__", None), "__name__", "")
    if what == "__get__":
        return of not in _SHARES_MEMORY
    return of in _MAY_BE_SET if what == "__set__" else what in _NEED_NO_VALUES


def _flat(values: Iterable[Any]) -> list[Any]:
    return [x for value in values for x in (_flat(value) if isinstance(value, tuple | list) else [value])]
