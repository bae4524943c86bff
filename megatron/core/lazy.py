"""Names of a package that are imported when first asked for, so that a file of plain integers loads without torch."""

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any, NoReturn


def lazy_names(package: str, home: Mapping[str, str]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """A package's `__getattr__` and `__dir__`. home: name -> the submodule that defines it.

    A name may not be that of a submodule, which would take its place as soon as anything imports it.
    """

    def get(name: str) -> Any:
        if name not in home:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(f"{package}.{home[name]}"), name)

    return get, lambda: sorted(home)


def not_built(module: str, reasons: Mapping[str, str]) -> Callable[[str], Any]:
    """A module's `__getattr__` for names of Megatron that cannot do their work here: importing one is fine, calling it raises
    NotImplementedError. reasons: name -> why, and what to do instead."""

    def get(name: str) -> Any:
        if name not in reasons:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")

        def refuse(*_: Any, **__: Any) -> NoReturn:
            raise NotImplementedError(f"{name}: {reasons[name]}")

        return refuse

    return get
