"""Names and packages are imported on first use, so that files of plain integers load without torch."""

import sys
from abc import ABCMeta
from collections.abc import Callable, Mapping
from functools import cache, partial
from importlib import import_module
from types import ModuleType
from typing import Any, NoReturn

from megatron.core.base.moved_or_unbuilt_megatron_names import ELSEWHERE, NOT_BUILT, SWITCHED_OFF, reason_of


def lazy_names(module: str, names: Mapping[str, str]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return a module's `__getattr__` and `__dir__`, which import names on first use.

    names: defining module -> names, separated by blanks; ".norm" is a submodule. A name must differ from every
    submodule's, which replaces it once imported, or the submodule be callable (`make_callable`).
    """
    home: dict[str, str] = {}
    for source, words in names.items():
        for name in words.split():
            home[name] = source

    def get(name: str) -> Any:
        if name not in home:
            return _name_of_megatron(module, name)
        return getattr(import_module(home[name], module), name)

    return get, lambda: sorted(home)


def all_names(module: str, homes: str) -> Callable[[str], Any]:
    """Return a module's `__getattr__` for every name of the modules `homes`, separated by blanks.

    A name is taken of the first module that has it.
    """

    def get(name: str) -> Any:
        for home in map(import_module, homes.split()):
            if hasattr(home, name):
                return getattr(home, name)
        return _name_of_megatron(module, name)

    return get


def make_callable(module: str, function: Callable[..., Any]) -> None:
    """Make a module callable: a call calls `function`, whose name in the package is hidden by the module's."""
    kind = type(
        "CallableModule", (ModuleType,), {"__call__": staticmethod(function), "__wrapped__": staticmethod(function)}
    )
    sys.modules[module].__class__ = kind


def optional_package(name: str, needed_by: str) -> Any:
    """Import the module `name`. Raises ImportError that says what needs its package and how to install it."""
    try:
        return import_module(name)
    except ImportError:
        package = name.split(".")[0]
        raise ImportError(f"{needed_by} needs the package {package}: pip install {package}") from None


def not_built(module: str, reasons: Mapping[str, str]) -> Callable[[str], Any]:
    """Return a module's `__getattr__` for unsupported functions of Megatron.

    They can be imported, and raise NotImplementedError if called. reasons: name -> the reason, and the alternative.
    """

    def get(name: str) -> Any:
        if name not in reasons:
            return _name_of_megatron(module, name)
        return _refusing(name, reasons[name])

    return get


def names_of_megatron(module: str) -> Callable[[str], Any]:
    """Return a module's `__getattr__` for names that Megatron has at this path and that are defined elsewhere here.

    Those that are not built raise NotImplementedError when called (`megatron_names`).
    """
    return partial(_name_of_megatron, module)


def _name_of_megatron(module: str, name: str) -> Any:
    for home, names in ELSEWHERE.get(module, {}).items():
        if name in names.split():
            return getattr(import_module(home), name)
    if name in NOT_BUILT.get(module, "").split():
        return _refusing(name, f"not built; {reason_of(module)}")
    if name in SWITCHED_OFF.split():
        return False
    raise AttributeError(f"module {module!r} has no attribute {name!r}")


class _Refused(ABCMeta):
    """The type of a name that is not built. It is ABCMeta's, so that a class may name an abstract one among its bases too."""

    _refusal: str

    def _refuse(cls, *_: Any, **__: Any) -> NoReturn:
        raise NotImplementedError(cls._refusal)

    __call__ = __getitem__ = __iter__ = _refuse

    def __getattr__(cls, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        raise NotBuiltAttributeError(cls._refusal)


class NotBuiltAttributeError(NotImplementedError, AttributeError):
    """An attribute of a name that is not built: `hasattr` answers no."""


@cache
def _refusing(name: str, reason: str) -> type:
    """Return what stands for a name that is not built. It raises NotImplementedError when it is used.

    It is a class, whatever Megatron has: in an annotation, in `isinstance` and among the bases of a class it does no
    harm. A call, of a subclass too, an attribute, an item and an iteration are uses.
    """
    return _Refused(name, (), {"_refusal": f"{name}: {reason}", "__module__": __name__})


def is_refused(thing: Any) -> bool:
    """Return whether this stands for a name of Megatron that is not built."""
    return isinstance(thing, _Refused)
