"""Parameters and `main_grad`s that are not resident: they have a shape and a name, and every other use is an error.

A released tensor changes its class to `ReleasedParameter` (stage 3), `ReleasedGradient` (stages 2 and 3) or
`LateGradient` (stages 0 and 1, which any use allocates), and back when it is resident again. torch then calls
`__torch_function__` before it touches the memory; without that, the process would crash. The price is one
assignment per release, and nothing while the tensor is resident.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from megatron.core.ops.main_grad_interface import slot_of

_SHARES_MEMORY = {"data", "T", "mT", "H", "mH", "real", "imag"}  # properties that are the values
_MAY_BE_SET = {"grad", "requires_grad"}
_LAYOUT = {"size", "numel", "nelement", "dim", "ndimension", "stride", "is_contiguous", "__len__"}
_KIND = {"is_floating_point", "is_complex", "element_size", "get_device", "__hash__"}
_HOOKS = {"requires_grad_", "register_hook", "register_post_accumulate_grad_hook"}
_NEED_NO_VALUES = _LAYOUT | _KIND | _HOOKS


class AwayTensor:
    """A tensor that is not resident. A function that needs its values calls `asked` first."""

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
        """Called before `function` uses these tensors. Returns the answer in its place, or None to let it run."""
        raise NotImplementedError


class ReleasedParameter(AwayTensor, nn.Parameter):
    """A released parameter. Its shape and metadata can be read; any other use raises an error with its name."""

    @staticmethod
    def asked(function: str, held: list[Any]) -> str | None:
        if function == "__repr__":
            return f"ReleasedParameter({_name_of(held)}, {tuple(held[0].shape)})"
        raise RuntimeError(
            f"{_name_of(held)} is used while ZeRO stage 3 has released it: its values are resident only while its module runs. "
            "Use it inside that module's forward, or pass it to the forward of a module without children, or use "
            "--zero-stage 2. To read all weights, save a checkpoint"
        )


class ArrivingParameter(AwayTensor, nn.Parameter):
    """A parameter whose updated values are in flight (stages 1 and 2). Any use waits for them, also outside its
    module's forward."""

    @staticmethod
    def asked(function: str, held: list[Any]) -> None:
        for parameter in held:
            parameter.slot.bucket.finish_gather()


class ReleasedGradient(AwayTensor, Tensor):
    """A released `main_grad`."""

    @staticmethod
    def asked(function: str, held: list[Any]) -> str | None:
        raise RuntimeError(
            f"main_grad of {_name_of(held)} is used while ZeRO stage 2 or 3 has released it: it is resident from the first "
            "gradient of a microbatch until its reduction. To add to it, call "
            "megatron.core.ops.main_grad_interface.open_main_grad(parameter) first; to read gradients, use --zero-stage 1"
        )


class LateGradient(AwayTensor, Tensor):
    """A `main_grad` of a step that has brought no gradient yet. Any use allocates it."""

    @staticmethod
    def asked(function: str, held: list[Any]) -> None:
        for gradient in held:
            gradient.slot.bucket.open()


_FAMILIES = ({nn.Parameter, ReleasedParameter, ArrivingParameter}, {Tensor, ReleasedGradient, LateGradient})


def become(kind: type, tensors: Iterable[Tensor]) -> None:
    """Change the class of these tensors; nn.Parameter and Tensor mean resident. Tensors of other classes are left
    alone."""
    family = next(family for family in _FAMILIES if kind in family)
    for tensor in tensors:
        if type(tensor) in family:
            tensor.__class__ = kind


def _name_of(held: list[Any]) -> str:
    slot = slot_of(held[0]) if held else None
    return "a parameter" if slot is None else slot.name


def _needs_no_values(func: Any) -> bool:
    what, of = getattr(func, "__name__", ""), getattr(getattr(func, "__self__", None), "__name__", "")
    if what == "__get__":
        return of not in _SHARES_MEMORY
    return of in _MAY_BE_SET if what == "__set__" else what in _NEED_NO_VALUES


def _flat(values: Iterable[Any]) -> list[Any]:
    return [x for value in values for x in (_flat(value) if isinstance(value, tuple | list) else [value])]
