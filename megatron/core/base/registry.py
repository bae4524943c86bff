"""Open tables: name -> entry. A script adds a line before it calls `pretrain`, and the flag of the table takes its name."""

import inspect
from collections import UserDict
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any, TypeVar, get_origin

Entry = TypeVar("Entry")
FUNCTIONS = "functions"  # of a checkpoint's state: setting -> what the entry that it names computes


class Table(UserDict[str, Entry]):
    """A table that refuses an entry of another form, with TypeError in the line that adds it.

    name: of the table, in errors. form: the dataclass of the entries; or they are functions, and form names their arguments.
    """

    def __init__(self, name: str, form: type | tuple[str, ...], entries: Mapping[str, Entry]):
        self.name = name
        self.form = form
        super().__init__(entries)

    def __setitem__(self, key: str, entry: Entry) -> None:
        if not _fits(entry, self.form):
            is_function = isinstance(self.form, tuple)
            names = ", ".join(self.form if is_function else (f.name for f in fields(self.form)))
            text = "a function" if is_function else f"{self.form.__name__}, whose fields have their declared types:"
            raise TypeError(f"{self.name}[{key!r}] is {entry!r}; it must be {text} ({names})")
        super().__setitem__(key, entry)

    def function_of(self, key: str) -> str:
        """What the entry computes, in its own words (its field `computes`); of one that says nothing: that it is the
        script's.

        Checkpoints keep it: two entries may have one name in two scripts, and two names may stand for one function."""
        return getattr(self[key], "computes", None) or f"{key} of a script"


def _fits(entry: Any, form: type | tuple[str, ...]) -> bool:
    """Whether functions are functions, and tuples tuples."""
    if isinstance(form, tuple):
        try:
            return bool(inspect.signature(entry).bind(*form))
        except (TypeError, ValueError):
            return False
    declared = ((f.name, get_origin(f.type)) for f in fields(form) if get_origin(f.type) in (Callable, tuple))
    return isinstance(entry, form) and all(isinstance(getattr(entry, name), kind) for name, kind in declared)
