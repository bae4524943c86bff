"""Names of a package that are imported when first asked for, so that a file of plain integers loads without torch."""

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any, NoReturn


def lazy_names(module: str, names: Mapping[str, str]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """A module's `__getattr__` and `__dir__`. names: the module that defines them -> names, separated by blanks. ".norm" is a
    module of the package itself.

    A name may not be that of a submodule, which would take its place as soon as anything imports it.
    """
    home = {name: source for source, some in names.items() for name in some.split()}

    def get(name: str) -> Any:
        if name not in home:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        return getattr(import_module(home[name], module), name)

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
