"""Modules of Megatron that have no file here are made when a script imports them.

`moved_or_unbuilt_megatron_names` lists their names: each is the object that stands elsewhere here, or refuses to be
called. Real files take precedence: Python asks this finder last.
"""

import sys
from collections.abc import Sequence
from functools import cache
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

from megatron.core.base.lazy_imports import names_of_megatron
from megatron.core.base.moved_or_unbuilt_megatron_names import ELSEWHERE, NOT_BUILT


@cache
def listed_modules() -> frozenset[str]:
    """Return the modules of the tables, with the packages around them."""
    listed = set()
    for module in (*ELSEWHERE, *NOT_BUILT):
        parts = module.split(".")
        listed.update(".".join(parts[:length]) for length in range(2, len(parts) + 1))
    return frozenset(listed)


class TableModules(MetaPathFinder, Loader):
    """Find and make the modules that only the tables know."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return a spec for a module of the tables, or None. All of them are packages: they may have submodules."""
        if fullname in listed_modules():
            return ModuleSpec(fullname, self, is_package=True)
        return None

    def exec_module(self, module: ModuleType) -> None:
        """Give the module its names, which are looked up when they are asked for."""
        module.__doc__ = "Names of Megatron that are defined elsewhere here, or not built."
        module.__getattr__ = names_of_megatron(module.__name__)  # type: ignore[method-assign]


def install() -> None:
    """Let Python ask the tables for a module of `megatron` that it finds nowhere."""
    if not any(isinstance(finder, TableModules) for finder in sys.meta_path):
        sys.meta_path.append(TableModules())
