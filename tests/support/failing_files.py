"""Test double of the file layer: every call of a save and of a load counted, and one of them failed, cut short or killed at.

    with counted(root) as calls: save()                          calls.made: (rank, kind, name) of each, in order
    with failing(root, at=7, how="ENOSPC") as calls: save()      call 7 fails; later ones work
    with failing(root, at=7, how="killed") as calls: save()      the rank that makes call 7 ends there, and the job with it

how: "killed"     before the call: nothing of it has happened. `Killed` is no Exception, so that nothing which catches one runs
     "killed after"  the call has happened; nothing after it has
     "killed in"  a write or a read has done half; any other call nothing
     "ENOSPC", "EIO", ...  the call fails with this error
     "ENOSPC in", "EIO in" half of a write has happened, and it fails
     "short"      a write or a read does half of what was asked, and says so: no error
alone: after a kill, whether only its rank makes no further call; without it no rank does, as where a machine goes down.
only: a predicate of (rank, kind, name); other calls are not counted. With ranks as threads (`local_ranks.run_ranks`) the order of
calls is the same in every run.

Kinds: open, write, read_into, sync, sync_folder, rename, remove, remove_folder, make_folder, names, stat, is_link.
"""

import contextlib
import errno
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from local_ranks import rank_of_thread

from megatron.core.storage import file_layer
from megatron.core.storage.fsspec_object_store import ObjectFiles

READS = ("read_into", "names", "stat", "is_link")
WRITES = ("open", "write", "sync", "sync_folder", "rename", "remove", "remove_folder", "make_folder")
KINDS = WRITES + READS
OF_OBJECTS = ("sizes", "remove_all")  # of an object store alone: reads, and changes


class Killed(BaseException):
    """The process ends here: nothing that catches an Exception runs."""


class FileCall(NamedTuple):
    rank: int
    kind: str
    name: str  # of the file or folder, with that of its folder

    @property
    def changes_disk(self) -> bool:
        return self.kind in (*WRITES, "remove_all") and not (self.kind == "open" and self.name.startswith("rb "))


class FailingFiles:
    """The file layer `inner` with its calls counted; call number `at`, from 1, goes wrong as `how` says."""

    def __init__(self, inner: Any, at: int = 0, how: str = "", *, alone: bool = False, only: Callable | None = None):
        self.inner, self.at, self.how = inner, at, how
        self.alone, self.only = alone, only
        self.made: list[FileCall] = []
        self.dead: set[int] | None = set()  # ranks that make no call any more; None: all
        self.hit: FileCall | None = None  # the call that went wrong
        self.names_of: dict[int, str] = {}  # of open files
        self.inside = threading.local()

    def __getattr__(self, kind: str) -> Callable:
        if kind not in KINDS + OF_OBJECTS:
            raise AttributeError(kind)
        return lambda *what: self.call(kind, *what)

    def call(self, kind: str, *what: Any) -> Any:
        rank = rank_of_thread()
        if self.dead is None or rank in self.dead:
            raise Killed(f"rank {rank} is dead and calls {kind}")
        call = FileCall(rank, kind, self.name(kind, *what))
        if self.only is not None and not self.only(call):
            return self.do(kind, *what)
        self.made.append(call)
        if len(self.made) != self.at:
            return self.do(kind, *what)
        self.hit = call
        return self.go_wrong(kind, *what)

    def do(self, kind: str, *what: Any) -> Any:
        self.inside.depth = getattr(self.inside, "depth", 0) + 1
        try:
            result = getattr(self.inner, kind)(*what)
        finally:
            self.inside.depth -= 1
        if kind == "open":
            self.names_of[id(result)] = self.name("open", *what).partition(" ")[2]
        return result

    @property
    def is_inside(self) -> bool:
        """Whether this thread is in a call of the layer: what the system is asked beside it is not."""
        return getattr(self.inside, "depth", 0) > 0

    def name(self, kind: str, *what: Any) -> str:
        if kind in ("write", "read_into", "sync"):
            return self.names_of.get(id(what[0]), "?")
        if kind == "remove_all":
            return ""
        name = "/".join(Path(what[0]).parts[-2:])
        return f"{what[1]} {name}" if kind == "open" else name

    def go_wrong(self, kind: str, *what: Any) -> Any:
        how, _, where = self.how.partition(" ")
        if (where == "in" or how == "short") and kind in ("write", "read_into"):
            done = self.do(kind, what[0], memoryview(what[1])[: max(len(what[1]) // 2, 1)])
        elif where == "after" or how == "short":
            done = self.do(kind, *what)
        if how == "short":
            return done
        if how == "killed":
            self.dead = {*(self.dead or ()), rank_of_thread()} if self.alone else None
            raise Killed(str(self.hit))
        number = getattr(errno, how)
        raise OSError(number, {"ENOSPC": "No space left on device", "EIO": "Input/output error"}.get(how, how))


@contextlib.contextmanager
def failing_store(at: int, how: str, **options: Any) -> Iterator[FailingFiles]:
    """`failing` of the object store memory://, in which nothing lies before or after the block."""
    inner = ObjectFiles("memory")
    inner._store.store.clear()
    file_layer.stores["memory"] = double = FailingFiles(inner, at, how, **options)
    try:
        yield double
    finally:
        del file_layer.stores["memory"]
        inner._store.store.clear()


@contextlib.contextmanager
def failing(at: int, how: str, **options: Any) -> Iterator[FailingFiles]:
    """In the block the file layer is a double of itself whose call number `at` goes wrong."""
    before = file_layer.local
    file_layer.local = double = FailingFiles(before, at, how, **options)
    try:
        yield double
    finally:
        file_layer.local = before


def counted(**options: Any) -> contextlib.AbstractContextManager[FailingFiles]:
    """In the block every call is listed, and none goes wrong."""
    return failing(0, "", **options)
