"""Megatron's own parser of one release judges command lines: the launch scripts of that release that it accepts itself.

    python -I megatron_arguments.py TREE < COMMANDS.json > VERDICTS.json
    python -I megatron_arguments.py TREE --flags > FLAGS.json

TREE: the files of a release. COMMANDS.json: a list of [program, words, ranks, environment]. VERDICTS.json: for each null if the
release's `parse_args` and `validate_args` accept it, otherwise the last line of what they say. FLAGS.json: for each flag of the release's
`add_megatron_arguments` a list of name, the attribute it sets, its number of values (0: a switch), type, choices and default, and
for a switch the value that it sets. A script of its own, in a process of
its own: that package is called `megatron`, as ours is.

The parser runs on a CPU. Packages that are not installed are replaced by doubles, and the device by one of NVIDIA's Hopper.
"""

import argparse
import contextlib
import importlib.abc
import importlib.machinery
import importlib.util
import inspect
import io
import json
import os
import pathlib
import re
import sys
import types
import typing
from typing import Any
from unittest.mock import MagicMock

tree = sys.argv[1]
sys.path[:] = [tree] + [p for p in sys.path if not os.path.exists(os.path.join(p, "megatron", "__init__.py"))]

import setuptools  # noqa: E402, F401  its folder has the package `packaging`

# isort: split
import packaging.version  # noqa: E402
import torch  # noqa: E402
import torch._dynamo  # noqa: E402  before doubles exist, which it would take for packages
import torch.distributed  # noqa: E402

# A file of the release that runs numpy's types of another package as it is imported.
OF_OTHER_PACKAGES = ("megatron.core.dist_checkpointing.strategies.zarr",)


def imported_packages(folder: str) -> set[str]:
    """Return the first names of all packages that the files of the release import."""
    packages = set()
    for path in pathlib.Path(folder, "megatron").rglob("*.py"):
        packages.update(re.findall(r"^\s*(?:import|from) (\w+)", path.read_text(), re.MULTILINE))
    return packages


class AnyAttribute(type):
    """Of a class that stands for one of a missing package: any of its attributes is there."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return MagicMock(name=name)


class DoubleClass(metaclass=AnyAttribute):
    """A class of a missing package, to derive from and to create with any arguments."""

    def __init_subclass__(cls, **kwargs: Any):
        pass

    def __init__(self, *args: Any, **kwargs: Any):
        pass

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return args[0] if args else None  # a decorator returns what it decorates


class DoubleModule(types.ModuleType):
    """A module in which every name is bound: a capital one to a class, which others derive from."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value = AnyAttribute(name, (DoubleClass,), {}) if name[0].isupper() else MagicMock(name=name)
        setattr(self, name, value)
        return value


class DoubleOfMissing(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Gives packages that are not installed doubles, whose attributes are doubles too."""

    def __init__(self, packages: set[str]):
        self._packages = packages

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if name.split(".")[0] not in self._packages and name not in OF_OTHER_PACKAGES:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        double = DoubleModule(spec.name)
        double.__path__ = []
        double.__version__ = "99.0"
        return double

    def exec_module(self, module: Any) -> None:
        pass


def load_arguments() -> Any:
    """Return the release's module of arguments."""
    for name in ("megatron.training.arguments", "megatron.arguments"):
        if importlib.util.find_spec(name.split(".")[0]) is None:
            continue
        path = os.path.join(tree, *name.split(".")) + ".py"
        if os.path.exists(path):
            return importlib.import_module(name)
    raise SystemExit(f"no arguments.py in {tree}")


DEFAULTS = {
    "pretrain_gpt.py": {"tokenizer_type": "GPT2BPETokenizer"},
    "pretrain_bert.py": {"tokenizer_type": "BertWordPieceLowerCase"},
    "pretrain_t5.py": {"tokenizer_type": "BertWordPieceLowerCase"},
}


def problem_of(arguments: Any, program: str, words: list[str], ranks: int) -> str | None:
    """Return the last line of what the parser says against a command; None if it accepts it."""
    sys.argv = [program, *words]
    os.environ |= {"WORLD_SIZE": str(ranks), "RANK": "0", "LOCAL_RANK": "0"}
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
            if "defaults" in inspect.signature(arguments.parse_args).parameters:
                arguments.parse_args(defaults=DEFAULTS[program])
            else:
                arguments.validate_args(arguments.parse_args(), DEFAULTS[program])
    except SystemExit:
        return (said.getvalue().strip().splitlines() or ["it exits"])[-1]
    except Exception as error:
        return f"{type(error).__name__}: {error}".splitlines()[0]
    return None


def plain(value: Any) -> Any:
    """Return a default or a choice as JSON has it; of an enumeration's member its name."""
    if isinstance(value, list | tuple):
        return [plain(one) for one in value]
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return str(value) if value != value or abs(value) == float("inf") else value
    return getattr(value, "name", None) or str(value)


def flags_of_release(arguments: Any) -> list[list[Any]]:
    """Return [flag, attribute, number of values, type, choices, default, value of a switch] of each spelling of each flag."""
    parser = arguments.add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
    found = []
    for action in parser._actions:
        if isinstance(action, argparse._HelpAction):
            continue
        count = 1 if action.nargs is None else action.nargs
        kind = getattr(action.type, "__name__", None) or (str(action.type) if action.type else "")
        choices = [plain(choice) for choice in action.choices] if action.choices else []
        for flag in action.option_strings:
            is_off = isinstance(action, argparse.BooleanOptionalAction) and flag.startswith("--no-")
            sets = None if count else plain(not is_off if action.const is None else action.const)
            found.append([flag, action.dest, count, kind, choices, plain(action.default), sets])
    return found


if __name__ == "__main__":
    torch.cuda.get_device_capability = lambda *_: (9, 0)
    torch.cuda.get_device_properties = lambda *_: MagicMock(major=9, minor=0)
    torch.cuda.device_count = lambda: 8
    torch.cuda.is_available = lambda: True
    if not hasattr(typing, "override"):  # of Python 3.12
        typing.override = lambda function: function
    packages = imported_packages(tree)
    missing = {name for name in packages - {"megatron", "tools"} if importlib.util.find_spec(name) is None}
    sys.modules["pkg_resources"] = types.SimpleNamespace(packaging=packaging)
    sys.meta_path.insert(0, DoubleOfMissing(missing))
    arguments_module = load_arguments()
    if "--flags" in sys.argv:
        print("\n" + json.dumps(flags_of_release(arguments_module)))
        raise SystemExit
    environment = dict(os.environ)
    verdicts = []
    for program, words, ranks, variables in json.load(sys.stdin):
        os.environ.clear()
        os.environ |= environment | {name: str(value) for name, value in variables.items()}
        verdicts.append(problem_of(arguments_module, program, words, ranks))
    print("\n" + json.dumps(verdicts))  # imports of a release may have printed lines before
