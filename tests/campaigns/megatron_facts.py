"""Facts of Megatron's releases, read from a clone: the arguments, with their defaults, of each public function and class.

    python tests/campaigns/megatron_facts.py CLONE tests/megatron_facts.json

Of the names that a release has, those are written that are here too, a line each: [module, name, [[arguments, releases]]], an
argument being "name", "name=default", "*name", "**name" or "*". Of a dataclass they are its fields, of an enumeration its members.
"""

import argparse
import ast
import importlib
import io
import json
import subprocess
import tarfile
import tempfile
import warnings
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

TAGS = ("v2.5", "23.04", "core_v0.5.0", "core_v0.12.0", "core_v0.16.1")
Definition = tuple["Release", str, ast.AST]  # where it stands: release, module; and its node


def statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """The statements of a module, those under `if` and `try` included."""
    for node in body:
        yield node
        for part in ("body", "orelse", "handlers", "finalbody"):
            if isinstance(node, ast.If | ast.Try | ast.ExceptHandler):
                yield from statements(getattr(node, part, []))


class Release:
    """The package `megatron` of one tag, in a folder."""

    def __init__(self, folder: Path):
        self.folder = folder
        paths = sorted((folder / "megatron").rglob("*.py"))
        names = (path.relative_to(folder).with_suffix("").as_posix().replace("/", ".") for path in paths)
        self.paths = {name.removesuffix(".__init__"): path for name, path in zip(names, paths)}

    @cache  # noqa: B019
    def tree(self, module: str) -> dict[str, ast.stmt | tuple[str, str]]:
        """Each name that a module binds -> its definition, or (module, name) it is imported from."""
        bound: dict[str, ast.stmt | tuple[str, str]] = {}
        for node in statements(ast.parse(self.paths[module].read_text()).body):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                bound[node.name] = node
            elif isinstance(node, ast.ImportFrom):
                source = self.source(module, node)
                for one in node.names:
                    if one.name == "*" and source in self.paths:
                        bound |= {name: (source, name) for name in self.tree(source) if not name.startswith("_")}
                    bound.setdefault(one.asname or one.name, (source, one.name))
            elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Name):
                bound |= {one.id: (module, node.value.id) for one in node.targets if isinstance(one, ast.Name)}
        return bound

    def source(self, module: str, node: ast.ImportFrom) -> str:
        if not node.level:
            return node.module or ""
        parts = module.split(".")
        is_package = self.paths[module].name == "__init__.py"
        base = parts[: len(parts) - node.level + is_package]
        return ".".join([*base, *([node.module] if node.module else [])])

    def find(self, module: str, name: str, depth: int = 0) -> tuple[str, ast.stmt] | None:
        """(module, definition) of a name, through the imports."""
        if module not in self.paths or depth > 9 or (found := self.tree(module).get(name)) is None:
            return None
        if isinstance(found, tuple):
            return None if found == (module, name) else self.find(*found, depth + 1)
        return module, found

    def arguments(self, module: str, node: ast.stmt) -> list[str] | None:
        """Of a function, or of a class's constructor; None if neither it nor a base in Megatron says them."""
        if isinstance(node, ast.FunctionDef):
            return arguments(node.args)
        if is_dataclass(node):
            return list(self.fields(module, node).values())
        for one in node.body:
            if isinstance(one, ast.FunctionDef) and one.name == "__init__":
                return arguments(one.args)[1:]
        for base in self.bases(module, node):
            if (found := self.arguments(*base)) is not None:
                return found
        if any(ast.unparse(base).endswith("Enum") for base in node.bases):
            return [one.targets[0].id for one in node.body if isinstance(one, ast.Assign)]
        return None

    def bases(self, module: str, node: ast.ClassDef) -> Iterator[tuple[str, ast.stmt]]:
        for base in node.bases:
            if isinstance(base, ast.Name) and (found := self.find(module, base.id)):
                yield found

    def fields(self, module: str, node: ast.ClassDef) -> dict[str, str]:
        """name -> argument of a dataclass."""
        found = {}
        for base in reversed(list(self.bases(module, node))):
            found |= self.fields(*base) if is_dataclass(base[1]) else {}
        for one in node.body:
            if isinstance(one, ast.AnnAssign) and "ClassVar" not in ast.unparse(one.annotation):
                value = one.value
                if isinstance(value, ast.Call) and ast.unparse(value.func).endswith("field"):
                    given = {key.arg: key.value for key in value.keywords}
                    if isinstance(given.get("init"), ast.Constant) and not given["init"].value:
                        continue
                    value = given.get("default", ast.Constant(...) if "default_factory" in given else None)
                found[one.target.id] = one.target.id + ("" if value is None else f"={ast.unparse(value)}")
        return found


def is_dataclass(node: ast.stmt) -> bool:
    return any("dataclass" in ast.unparse(one) for one in getattr(node, "decorator_list", ()))


def arguments(given: ast.arguments) -> list[str]:
    plain = [*given.posonlyargs, *given.args]
    defaults = [None] * (len(plain) - len(given.defaults)) + given.defaults
    found = [one.arg + ("" if value is None else f"={ast.unparse(value)}") for one, value in zip(plain, defaults)]
    if given.vararg or given.kwonlyargs:
        found.append(f"*{given.vararg.arg if given.vararg else ''}")
    for one, value in zip(given.kwonlyargs, given.kw_defaults):
        found.append(one.arg + ("" if value is None else f"={ast.unparse(value)}"))
    return found + ([f"**{given.kwarg.arg}"] if given.kwarg else [])


def here(module: str) -> Any:
    """Our module of that name, or None."""
    try:
        return importlib.import_module(module)
    except ImportError:
        return None


def facts(clone: str) -> dict[str, dict[str, list[Any]]]:
    written: dict[str, dict[str, list[Any]]] = {}
    for tag in TAGS:
        with tempfile.TemporaryDirectory() as folder:
            packed = subprocess.run(["git", "-C", clone, "archive", tag, "megatron"], capture_output=True, check=True)
            with tarfile.open(fileobj=io.BytesIO(packed.stdout)) as tar:
                tar.extractall(folder, filter="data")
            release = Release(Path(folder))
            for module in release.paths:
                ours = here(module)
                for name in release.tree(module) if ours is not None else ():
                    found = (
                        None
                        if name.startswith("_") or not callable(getattr(ours, name, None))
                        else release.find(module, name)
                    )
                    if found and (said := release.arguments(*found)) is not None:
                        known = written.setdefault(module, {}).setdefault(name, [])
                        same = next((one for one in known if one[0] == said), None)
                        same[1].append(tag) if same else known.append([said, [tag]])
    return written


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("clone")
    parser.add_argument("output", type=Path)
    asked = parser.parse_args()
    warnings.simplefilter("ignore")
    found = facts(asked.clone)
    lines = [json.dumps([module, *fact]) for module in sorted(found) for fact in sorted(found[module].items())]
    asked.output.write_text("[\n" + ",\n".join(lines) + "\n]\n")
    print(f"{len(lines)} names in {len(found)} modules")
