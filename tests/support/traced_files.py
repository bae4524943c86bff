"""What a block asks the system about files below a folder beside the file layer, and what through it.

    with traced(root) as trace: save()
    trace.beside == []; trace.calls                     what went beside, and the calls of the layer (`failing_files.FileCall`)

The interpreter tells of most calls by its audit hook; the others are replaced. Ranks and writers must be threads.
"""

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from failing_files import FileCall, counted

_NOT_AUDITED = ("stat", "lstat", "fsync", "access", "readlink")
_heard = []
_is_listening = []


class Trace(NamedTuple):
    beside: list[tuple[str, str]]  # what, and the function of the package that asks, as "module.function"
    calls: list[FileCall]


def _listen() -> None:
    """An audit hook stays until the process ends, so there is one for all."""
    if not _is_listening:
        _is_listening.append(True)
        sys.addaudithook(lambda what, given: [tell(what, *given) for tell in _heard])


def _asking() -> str:
    frame = sys._getframe(1)
    while frame is not None and not frame.f_globals.get("__name__", "").startswith("megatron."):
        frame = frame.f_back
    if frame is None:
        return "?"
    return f"{frame.f_globals['__name__'].removeprefix('megatron.')}.{frame.f_code.co_name}"


@contextlib.contextmanager
def traced(root: Path) -> Iterator[Trace]:
    _listen()
    watched, reals = str(root), {name: getattr(os, name) for name in _NOT_AUDITED}
    with counted() as calls:
        trace = Trace([], calls.made)

        def note(what: str, *given: object) -> None:
            names = (os.fsdecode(x) for x in given if isinstance(x, str | bytes | os.PathLike))
            if not calls.is_inside and any(watched in name for name in names):
                trace.beside.append((what, _asking()))

        def heard(name: str):
            return lambda *given, **more: (note(name, *given), reals[name](*given, **more))[1]

        _heard.append(note)
        for name in reals:
            setattr(os, name, heard(name))
        try:
            yield trace
        finally:
            for name, real in reals.items():
                setattr(os, name, real)
            _heard.remove(note)
