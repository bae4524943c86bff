"""Whether `megatron.doctor` tells of public forks what is missing here when their scripts run.

    python tests/compat/doctor_on_forks.py FOLDER...

FOLDER: a checkout of a fork. Two questions, asked independently of each other:

    doctor      reads each file's syntax tree
    running     imports each file over our `megatron` in a process of its own, with stand-ins for packages that are not installed, and
                with a stand-in for each name that is missing, so that the next is met too; then the code of its functions is looked up in the
                objects that the file holds, and what was found is called, to see whether it is refused. Programs `pretrain_*.py` are
                started with a small model besides.

It prints a row of docs/coming_from_megatron.md for each fork, and on standard error what the two disagree about.
"""

import argparse
import builtins
import contextlib
import dis
import importlib.abc
import importlib.machinery
import json
import os
import re
import runpy
import signal
import sys
import tempfile
import threading
import types
from collections import Counter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests/support")]
SECONDS = 20  # for a file
MODEL = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32 --micro-batch-size 2 "
    "--train-iters 2 --lr 1e-3 --split 949,50,1 --eval-iters 1 --eval-interval 2 --log-interval 1"
)


class Kind(type):
    """Of a stand-in: its attributes are stand-ins too."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (StandIn,), {})

    def __getitem__(cls, _: Any) -> Any:  # of types
        return cls


class StandIn(types.ModuleType, metaclass=Kind):
    """Anything that is not here: a module, a class, a function, a number."""

    def __init__(self, name: str = "stand_in", *_: Any, **__: Any) -> None:
        super().__init__(str(name))
        self.__path__: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (StandIn,), {})

    def __enter__(self) -> "StandIn":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def __call__(self, *args: Any, **_: Any) -> Any:
        return args[0] if len(args) == 1 and callable(args[0]) else StandIn()


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds what nobody else does, `megatron` aside."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name.split(".")[0] in ("megatron", "torch", "numpy"):
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: Any) -> Any:
        return StandIn(spec.name)

    def exec_module(self, module: Any) -> None:
        pass


class Watch:
    """Notes the names of `megatron` that a file of the fork does not find, and puts stand-ins in their places."""

    def __init__(self, root: Path) -> None:
        self.root, self.missing = str(root), set()
        self.found: dict[str, Any] = {}
        self._import = builtins.__import__
        builtins.__import__ = self.imports

    def is_fork(self, depth: int = 2) -> bool:
        return sys._getframe(depth).f_code.co_filename.startswith(self.root)

    def imports(self, name: str, globals: Any = None, locals: Any = None, fromlist: Any = (), level: int = 0) -> Any:
        space, local, names = globals, locals, fromlist
        if level or name.split(".")[0] != "megatron" or not self.is_fork():
            return self._import(name, space, local, names, level)
        full = [f"{name}.{one}" for one in names or () if one != "*"] or [name]
        try:
            module = self._import(name, space, local, ("x",), 0)
        except ImportError:
            self.missing.update(full)
            stand_in = StandIn(name)
            if names:
                return stand_in
            sys.modules[name] = stand_in
            return sys.modules["megatron"]
        for one in names or ():
            if one == "*":
                continue
            try:
                self.found[f"{name}.{one}"] = getattr(module, one)
            except (AttributeError, ImportError):
                try:
                    self.found[f"{name}.{one}"] = self._import(f"{name}.{one}", space, local, ("x",), 0)
                except ImportError:
                    self.missing.add(f"{name}.{one}")
                    setattr(module, one, type(one, (StandIn,), {}))
        return module if names else sys.modules["megatron"]

    def look_up(self, space: dict[str, Any], path: str) -> None:
        """Follow `global.attribute...` in the code of every function of a file."""
        codes = [value.__code__ for value in space.values() if isinstance(value, types.FunctionType)]
        codes += [
            value.__code__
            for kind in space.values()
            if isinstance(kind, type)
            for value in vars(kind).values()
            if isinstance(value, types.FunctionType)
        ]
        for code in codes:
            if code.co_filename != path:
                continue
            thing, name = None, ""
            for step in dis.get_instructions(code):
                if step.opname == "LOAD_GLOBAL":
                    thing = space.get(step.argval)
                    name = getattr(thing, "__name__", "") if isinstance(thing, types.ModuleType) else ""
                elif (
                    step.opname in ("LOAD_ATTR", "LOAD_METHOD")
                    and name.startswith("megatron")
                    and not isinstance(thing, StandIn)
                ):
                    name = f"{name}.{step.argval}"
                    try:
                        thing = getattr(thing, step.argval)
                        self.found[name] = thing
                    except (AttributeError, ImportError):
                        self.missing.add(name)
                        name = ""
                    if not isinstance(thing, types.ModuleType):
                        name = ""
                elif step.opname not in ("CACHE", "PRECALL"):
                    name = ""

    def watch_args(self) -> None:
        """Note the attributes that `get_args()` lacks."""
        from megatron.training.arguments.args_namespace import Arguments

        def lacking(namespace: Any, name: str) -> Any:
            import linecache

            frame = sys._getframe(1)
            line = linecache.getline(frame.f_code.co_filename, frame.f_lineno)
            if not self.is_fork() or name.startswith("__") or "hasattr" in line or "getattr" in line:
                raise AttributeError(name)
            self.missing.add(f"get_args().{name}")
            return None

        Arguments.__getattr__ = lacking


def refuses(thing: Any) -> bool:
    """Whether any call raises NotImplementedError. Other functions do nothing with an argument that none of them has."""
    try:
        thing(**{"no such argument": 0})
    except NotImplementedError as error:
        return "no such argument" not in str(error)
    except BaseException:
        return False
    return False


def run_file(file: Path, root: Path, flags: list[str] | None) -> dict[str, Any]:
    """Import a file, or start it with flags, and return what it met."""
    read, write = os.pipe()
    child = os.fork()
    if not child:
        os.setsid()  # its processes are a group, which ends with it: a worker left over would keep the pipe open
        said = os.open(os.devnull, os.O_WRONLY)
        os.dup2(said, 1)
        os.dup2(said, 2)
        os.chdir(tempfile.mkdtemp())
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        watch, ended = Watch(root), "ended"
        sys.meta_path.append(Finder())
        sys.path[:0] = [str(file.parent), str(root)]
        sys.argv = [str(file), *(flags or [])]
        watch.watch_args()
        answer: dict[str, Any] = {}

        def tell() -> None:
            refused = [name for name, thing in watch.found.items() if refuses(thing)]
            answer.update(missing=sorted(watch.missing), found=sorted(watch.found), refused=refused, ended=ended)
            with os.fdopen(write, "w") as pipe:
                json.dump(answer, pipe)
            os.killpg(0, signal.SIGKILL)

        timer = threading.Timer(SECONDS, tell)  # a signal would not end a wait for other processes
        timer.daemon = True
        timer.start()
        try:
            if flags is None:
                parts = file.relative_to(root).with_suffix("").parts
                if len(parts) > 1 and all(
                    part.isidentifier() for part in parts
                ):  # it may import its neighbours by dots
                    space = runpy.run_module(".".join(parts), run_name="a_file_of_the_fork")
                else:
                    space = runpy.run_path(str(file), run_name="a_file_of_the_fork")
                watch.look_up(space, str(file))
            else:
                runpy.run_path(str(file), run_name="__main__")
        except SystemExit as error:
            ended = f"exit {error.code}"
        except BaseException as error:
            ended = f"{type(error).__name__}: {error}"[:300]
            for argument in re.findall(r"unexpected keyword argument '(\w+)'", ended):
                watch.missing.add(f"an argument {argument}=")
        tell()
    os.close(write)
    with os.fdopen(read) as pipe:
        text = pipe.read()
    os.waitpid(child, 0)
    return json.loads(text) if text else {"missing": [], "found": [], "refused": [], "ended": "killed"}


def data() -> list[str]:
    """Return flags of a token file."""
    from token_files import NULL, write

    prefix = write(
        Path(tempfile.mkdtemp()) / "tokens", [[[(start + i) % 90 for i in range(300)]] for start in range(60)]
    )
    return ["--data-path", prefix, *NULL]


def canonical(name: str) -> str:
    """Return a name with the name that its module gives itself: `megatron.mpu` is `megatron.core.parallel_state`."""
    from megatron.porting.judge_fork_names_and_flags import find

    before, _, last = name.rpartition(".")
    if not before or not name.startswith("megatron."):
        return name
    try:
        module = find(before)
    except (ImportError, AttributeError):
        return name
    return f"{module.__name__}.{last}" if isinstance(module, types.ModuleType) else name


def is_named(name: str, states: dict[str, str]) -> bool:
    """Whether the doctor has called a name, or what it lies in, missing or different."""
    parts = name.split(".")
    return any(states.get(".".join(parts[:i]), "there") != "there" for i in range(1, len(parts) + 1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folders", nargs="+", type=Path)
    import megatron.training.training  # noqa: F401  # once, not by every child
    from megatron.doctor import examine, files_of
    from megatron.porting.map_cuda_to_cpu import map_to_cpu

    map_to_cpu()
    flags = [*MODEL.split(), *data()]
    totals: Counter[str] = Counter()
    for root in parser.parse_args().folders:
        root = root.resolve()
        found = examine(root)
        states = {canonical(entry["name"]): entry["state"] for entry in found["names"]}
        for entry in found["names"]:
            for argument in re.findall(r"(\w+=)[,;]", entry["change"]) if entry["state"] == "other" else ():
                states[f"an argument {argument}"] = "other"
        missing, present, refused, ends = set(), set(), set(), Counter()
        for file in files_of(root)[0]:
            starts = [None, flags] if file.name in ("pretrain_gpt.py", "finetune.py", "finetune_llama.py") else [None]
            for given in starts:
                met = run_file(file, root, given)
                missing |= {canonical(name) for name in met["missing"]}
                present |= set(met["found"])
                refused |= {canonical(name) for name in met["refused"]}
                ends[met["ended"].split(":")[0]] += 1
                if given or met["ended"] != "ended":
                    print(
                        f"{root.name}: {file.relative_to(root)}{' with flags' if given else ''}: {met['ended']}",
                        file=sys.stderr,
                    )
        named = {name for name in missing | refused if is_named(name, states)}
        wrong = {name for name in missing | refused if states.get(name) == "there"}
        print(
            f"{root.name}: not named: {sorted((missing | refused) - named)}; called present: {sorted(wrong)}",
            file=sys.stderr,
        )
        counts = {kind: Counter(entry["state"] for entry in found[kind]) for kind in ("names", "flags")}
        cells = [", ".join(str(counts[kind][state]) for state in ("there", "other", "missing")) for kind in counts]
        cells += [f"{sum(ends.values())}, {len(present)}"]
        cells += [str(len(names)) for names in (missing, refused, named, wrong)]
        print(f"| {root.name} | {' | '.join(cells)} |", flush=True)
        totals.update(missing=len(missing), refused=len(refused), named=len(named), wrong=len(wrong))
    print(f"| all | | | | {' | '.join(str(totals[key]) for key in ('missing', 'refused', 'named', 'wrong'))} |")


if __name__ == "__main__":
    with contextlib.suppress(BrokenPipeError):
        main()
