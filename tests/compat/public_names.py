"""The public names of each file of Megatron core at whose path a file of ours stands, read from a clone: those of each of `TAGS`.

    python tests/compat/public_names.py CLONE > tests/megatron_public_names.json

Public are the functions, classes and variables that a file defines under a name without an underscore; of a package, also what its
`__init__` imports from Megatron or lists in `__all__`.
"""

import argparse
import ast
import json
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TAGS = ("core_v0.12.0", "core_v0.16.1", "core_v0.17.1", "core_v0.18.0", "core_v0.19.0")
NOT_NAMES = {"logger", "T"}  # of logging, and a type variable


def git(clone: str, *arguments: str) -> str:
    return subprocess.run(["git", "-C", clone, *arguments], capture_output=True, text=True, check=True).stdout


def statements(body: list[ast.stmt]) -> list[ast.stmt]:
    """With those inside `try` and `if`, where optional packages are imported."""
    found = list(body)
    for node in found:
        if isinstance(node, ast.Try):
            found += node.body
        elif isinstance(node, ast.If):
            found += node.body + node.orelse
    return found


def public_names(text: str, *, is_package: bool) -> set[str]:
    names = set()
    for node in statements(ast.parse(text).body):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign):
            for target in node.targets:
                if isinstance(target, ast.Name) and target.id == "__all__":
                    names |= (
                        set(ast.literal_eval(node.value)) if isinstance(node.value, ast.List | ast.Tuple) else set()
                    )
                elif isinstance(target, ast.Name):
                    names.add(target.id)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            names.add(node.target.id)
        elif (
            is_package
            and isinstance(node, ast.ImportFrom)
            and (node.level or (node.module or "").startswith("megatron"))
        ):
            names |= {alias.asname or alias.name for alias in node.names}
    return {name for name in names if not name.startswith("_")} - NOT_NAMES


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("clone", help="a clone of Megatron-LM")
    clone = parser.parse_args().clone
    found: dict[str, set[str]] = {}
    for tag in TAGS:
        for path in git(clone, "ls-tree", "-r", "--name-only", tag, "megatron").split():
            if path.endswith(".py") and (ROOT / path).is_file():
                names = public_names(git(clone, "show", f"{tag}:{path}"), is_package=path.endswith("__init__.py"))
                module = path.removesuffix(".py").replace("/", ".").removesuffix(".__init__")
                found[module] = found.get(module, set()) | names
    named = {module: " ".join(sorted(names)) for module, names in sorted(found.items()) if names}
    print(json.dumps(named, indent=1))


if __name__ == "__main__":
    main()
