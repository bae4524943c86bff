"""Serves modules by the names that they had, so that tests written before a move import, and test, what was moved.

    {
        "old.module": "new.module",                 the module, and if it is a package all below it
        "old.module:name": "new.module:name"        one name of it
    }

A module that moved as a whole is the new module itself under the old name too: what a test sets on it, the code sees. Where names
went to several modules, the old name stands for a module that passes what is read, set and deleted on to where each name is now.

    install(table, root)        root: the folder of the product, whose tests are in root/tests

Where the product has another module under an old name today, the old one is given to files of root/tests alone, which write
`from old.package import module, name`.
"""

import builtins
import importlib
import importlib.abc
import importlib.machinery
import json
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any


class Scattered(ModuleType):
    """A module that is no more: its names are read, set and deleted where they are now."""

    def __init__(self, name: str, whole: str | None, names: Mapping[str, tuple[str, str]]):
        """whole: the module that has the names which are not in `names`; names: name -> (module, name there)."""
        super().__init__(name)
        self.__dict__["_whole"], self.__dict__["_names"] = whole, dict(names)

    def _place(self, name: str) -> tuple[ModuleType, str]:
        if name in self._names:
            module, there = self._names[name]
            return importlib.import_module(module), there
        if self._whole is None or (name.startswith("__") and name.endswith("__")):
            raise AttributeError(f"{self.__name__} has no {name}, and the table does not say where it went")
        return importlib.import_module(self._whole), name

    def __getattr__(self, name: str) -> Any:
        module, there = self._place(name)
        return getattr(module, there)

    def __setattr__(self, name: str, value: Any) -> None:
        try:
            module, there = self._place(name)
        except AttributeError:  # what the import system notes about a module, and its submodules
            super().__setattr__(name, value)
        else:
            setattr(module, there, value)

    def __delattr__(self, name: str) -> None:
        module, there = self._place(name)
        delattr(module, there)


class Table:
    """The entries of a table of renamed modules, of a product in the folder `root`."""

    def __init__(self, entries: Mapping[str, str], root: Path):
        self.root = root
        self.modules = {old: new for old, new in entries.items() if ":" not in old}
        self.names: dict[str, dict[str, tuple[str, str]]] = {}
        for old, new in entries.items():
            if ":" in old:
                module, name = old.split(":")
                to, _, there = new.partition(":")
                self.names.setdefault(module, {})[name] = to, there or name
        parts = [name.split(".") for name in (*self.modules, *self.names)]
        self.packages = {".".join(words[:count]) for words in parts for count in range(1, len(words))}

    def place(self, name: str) -> str | None:
        """Where a module went, by its own entry or by that of the nearest package above it that has one."""
        words = name.split(".")
        for count in range(len(words), 0, -1):
            if (above := ".".join(words[:count])) in self.modules:
                return ".".join([self.modules[above], *words[count:]])
        return None

    def is_old(self, name: str) -> bool:
        return name in self.names or self.place(name) is not None

    def is_taken(self, name: str) -> bool:
        """Whether the product has a module of this name today."""
        path = self.root.joinpath(*name.split("."))
        return path.with_suffix(".py").is_file() or (path / "__init__.py").is_file()

    def serve(self, name: str) -> ModuleType:
        """What an old name stands for."""
        whole = self.place(name)
        if name in self.names:  # of a module that is still there, the names that are not in the table are there
            return Scattered(name, whole or (name if self.is_taken(name) else None), self.names[name])
        return importlib.import_module(whole)


class _Loader(importlib.abc.Loader):
    def __init__(self, module: ModuleType):
        self.module, self.spec = module, getattr(module, "__spec__", None)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return self.module

    def exec_module(self, module: ModuleType) -> None:
        if not isinstance(module, Scattered):
            module.__spec__ = self.spec  # which the import system has just replaced


class _Old(importlib.abc.MetaPathFinder):
    """Finds the old names. Comes first: below a package that moved, the usual finders would load its modules a second time."""

    def __init__(self, table: Table):
        self.table = table

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if not self.table.is_old(name) or self.table.is_taken(name):
            return None
        module = self.table.serve(name)
        if isinstance(module, Scattered) and name in self.table.packages:
            module.__dict__["__path__"] = []
        return importlib.machinery.ModuleSpec(name, _Loader(module))


class _Gone(importlib.abc.MetaPathFinder):
    """Finds the packages of old names of which nothing is left. Comes last."""

    def __init__(self, table: Table):
        self.table = table

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if name not in self.table.packages:
            return None
        return importlib.machinery.ModuleSpec(name, _Loader(ModuleType(name)), is_package=True)


def install(entries: Mapping[str, str], root: Path) -> None:
    """From now on old names are found."""
    table = Table(entries, root)
    sys.meta_path.insert(0, _Old(table))
    sys.meta_path.append(_Gone(table))
    if entries:
        builtins.__import__ = _importing(builtins.__import__, table)


def _importing(before: Callable, table: Table) -> Callable:
    """`import`, which gives the tests an old name that the product has given to another module."""
    tests, served = f"{table.root / 'tests'}{os.sep}", {}

    def is_apart(name: str) -> bool:
        return table.is_old(name) and table.is_taken(name)

    def old(name: str) -> ModuleType:
        if name not in served:
            served[name] = table.serve(name)
        return served[name]

    def imports(name: str, globals: Any = None, locals: Any = None, fromlist: Any = (), level: int = 0) -> ModuleType:
        importer = (globals or {}).get("__file__") or ""
        if level or not os.path.abspath(importer).startswith(tests):
            return before(name, globals, locals, fromlist, level)
        modules = [word for word in fromlist or () if is_apart(f"{name}.{word}")]
        if not modules and not is_apart(name):
            return before(name, globals, locals, fromlist, level)
        if not fromlist:
            raise ImportError(f"{importer} imports {name}, whose name is another module's now: use from ... import")
        others = [word for word in fromlist if word not in modules]
        module = old(name) if is_apart(name) else before(name, globals, locals, others or ("__name__",), 0)
        found = ModuleType(name)  # what the statement takes its names from
        for word in fromlist:
            if word in modules:
                setattr(found, word, old(f"{name}.{word}"))
            elif hasattr(module, word):
                setattr(found, word, getattr(module, word))
        return found

    return imports


def install_from_environment() -> None:
    """With the table in the file RENAMED_MODULES, of the product in the folder RENAMED_MODULES_ROOT."""
    if path := os.environ.get("RENAMED_MODULES"):
        install(json.loads(Path(path).read_text()), Path(os.environ["RENAMED_MODULES_ROOT"]))
