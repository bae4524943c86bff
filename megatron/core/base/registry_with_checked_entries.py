"""Registries are tables name -> entry that a script may extend before it calls `pretrain`; flags take the names."""

import inspect
from collections import UserDict
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any, TypeVar, get_origin

Entry = TypeVar("Entry")
FUNCTIONS = "functions"  # key of a checkpoint's state: setting -> what the entry that it names computes


class Registry(UserDict[str, Entry]):
    """A registry refuses an entry of another form, with TypeError in the line that adds it.

    name: of the registry, in errors. form: the dataclass of the entries; or they are functions, and form names
    their arguments.
    """

    def __init__(self, name: str, form: type | tuple[str, ...], entries: Mapping[str, Entry]):
        self.name = name
        self.form = form
        super().__init__(entries)

    def __setitem__(self, key: str, entry: Entry) -> None:
        if not _fits(entry, self.form):
            if isinstance(self.form, tuple):
                kind = "a function"
                names = self.form
            else:
                kind = f"{self.form.__name__}, whose fields have their declared types:"
                names = tuple(field.name for field in fields(self.form))
            raise TypeError(f"{self.name}[{key!r}] is {entry!r}; it must be {kind} ({', '.join(names)})")
        super().__setitem__(key, entry)

    def function_of(self, key: str) -> str:
        """Return what the entry computes, as its field `computes` says; without that field, that it is the script's.

        Checkpoints keep it: two entries may have one name in two scripts, and two names may stand for one function.
        """
        return getattr(self[key], "computes", None) or f"{key} of a script"


def _fits(entry: Any, form: type | tuple[str, ...]) -> bool:
    """Return whether an entry has the form.

    That is a function of these arguments, or the dataclass with functions and tuples.
    """
    if isinstance(form, tuple):
        try:
            return bool(inspect.signature(entry).bind(*form))
        except (TypeError, ValueError):
            return False
    if not isinstance(entry, form):
        return False
    for field in fields(form):
        kind = get_origin(field.type)
        if kind in (Callable, tuple) and not isinstance(getattr(entry, field.name), kind):
            return False
    return True
