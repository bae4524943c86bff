"""Parameters and `main_grad`s whose memory is not resident.

A released tensor changes its class, and changes it back when it is resident again:

    class                 resident again             a use of its values
    ReleasedParameter     its unit's next use        is an error               parameter of stage 3
    AllGatherPendingParameter    finish_gather()            waits for the gather      updated parameter of stages 1 and 2
    ReleasedGradient      its next gradient          is an error               main_grad of stages 2 and 3
    LazyZeroGradient          its first gradient         allocates zeros           main_grad of stages 0 and 1

torch calls `__torch_function__` of such a class before it touches the memory; without that, the process would crash.
Shape, dtype and the like can always be read. The price is one assignment per release, and nothing for resident tensors.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from megatron.core.distributed.param_grad_state import place_in_bucket
from megatron.core.ops.main_grad_interface import grad_sink_of

# Functions and properties that work without the values.
_SHARES_MEMORY = {
    "data",
    "T",
    "mT",
    "H",
    "mH",
    "real",
    "imag",
}  # all properties do, but for these, which are the values
_MAY_BE_SET = {"grad", "requires_grad"}
_LAYOUT = {"size", "numel", "nelement", "dim", "ndimension", "stride", "is_contiguous", "__len__"}
_KIND = {"is_floating_point", "is_complex", "element_size", "get_device", "__hash__"}
_HOOKS = {"requires_grad_", "register_hook", "register_post_accumulate_grad_hook"}
_NEED_NO_VALUES = _LAYOUT | _KIND | _HOOKS


class BeforeUseHookTensor:
    """A tensor, of any shape, that is not resident. A function that needs its values calls `before_use` first."""

    __slots__ = ()  # so that `__class__` of a tensor can be set to this class and back

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if not _needs_no_values(func):
            arguments = _flatten((*args, *(kwargs or {}).values()))
            tensors = [x for x in arguments if isinstance(x, cls)]
            answer = cls.before_use(getattr(func, "__name__", ""), tensors)
            if answer is not None:
                return answer
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @staticmethod
    def before_use(function: str, tensors: list[Any]) -> str | None:
        """Prepare these tensors, of any shapes, for `function`, or raise an error.

        Returns the answer in the function's place, or None to let it run.
        """
        raise NotImplementedError


class ReleasedParameter(BeforeUseHookTensor, nn.Parameter):
    """A released parameter. Its shape and metadata can be read; any other use raises an error with its name."""

    @staticmethod
    def before_use(function: str, tensors: list[Any]) -> str | None:
        """Raise RuntimeError with the parameter's name; answer only `__repr__`."""
        if function == "__repr__":
            return f"ReleasedParameter({_name_of(tensors)}, {tuple(tensors[0].shape)})"
        raise RuntimeError(
            f"{_name_of(tensors)} is used while ZeRO stage 3 has released it: its values are in memory only while its "
            "module runs. Use it inside the forward of that module, or pass it as an argument to a module without "
            "submodules, or use --zero-stage 2. To read all weights, save a checkpoint"
        )


class AllGatherPendingParameter(BeforeUseHookTensor, nn.Parameter):
    """A parameter whose updated values are in flight (stages 1 and 2).

    Any use waits for them, also outside its module's forward.
    """

    @staticmethod
    def before_use(function: str, tensors: list[Any]) -> None:
        """Wait for the all-gather of these parameters, of any shapes."""
        for parameter in tensors:
            parameter.grad_sink.bucket.finish_gather()


class ReleasedGradient(BeforeUseHookTensor, Tensor):
    """A released `main_grad`. Any use of its values raises an error with the parameter's name."""

    @staticmethod
    def before_use(function: str, tensors: list[Any]) -> str | None:
        """Raise RuntimeError with the parameter's name."""
        raise RuntimeError(
            f"main_grad of {_name_of(tensors)} was used, but ZeRO stage 2 or 3 has released it. It is in memory from "
            "the first gradient of a microbatch until its reduction. To add to it, first call "
            "megatron.core.ops.main_grad_interface.open_main_grad(parameter); to read gradients, use --zero-stage 1"
        )


class LazyZeroGradient(BeforeUseHookTensor, Tensor):
    """A `main_grad` of a step that has added no gradient yet. Any use allocates it."""

    @staticmethod
    def before_use(function: str, tensors: list[Any]) -> None:
        """Allocate these gradients, of any shapes, as zeros."""
        for gradient in tensors:
            gradient.grad_sink.bucket.open()


_PARAMETER_CLASSES = {nn.Parameter, ReleasedParameter, AllGatherPendingParameter}
_GRADIENT_CLASSES = {Tensor, ReleasedGradient, LazyZeroGradient}


def set_residency_class(kind: type, tensors: Iterable[Tensor]) -> None:
    """Change the class of these tensors, of any shapes; nn.Parameter and Tensor mean resident.

    Tensors of a script's own classes are left alone.
    """
    classes = _PARAMETER_CLASSES if kind in _PARAMETER_CLASSES else _GRADIENT_CLASSES
    assert kind in classes, kind
    for tensor in tensors:
        if type(tensor) in classes:
            tensor.__class__ = kind


def _name_of(tensors: list[Any]) -> str:
    if not tensors:
        return "a parameter"
    place = place_in_bucket(tensors[0]) or grad_sink_of(tensors[0])  # of a parameter, or of its main_grad
    return "a parameter" if place is None else place.name


def _needs_no_values(func: Any) -> bool:
    """Return whether a torch function works on a tensor without memory.

    For a property, torch passes its `__get__` or `__set__`.
    """
    name = getattr(func, "__name__", "")
    property_name = getattr(getattr(func, "__self__", None), "__name__", "")
    if name == "__get__":
        return property_name not in _SHARES_MEMORY
    if name == "__set__":
        return property_name in _MAY_BE_SET
    return name in _NEED_NO_VALUES


def _flatten(values: Iterable[Any]) -> list[Any]:
    """Return the elements of nested tuples and lists."""
    result = []
    for value in values:
        if isinstance(value, tuple | list):
            result += _flatten(value)
        else:
            result.append(value)
    return result
