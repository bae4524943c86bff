"""The names of Megatron that its own scripts and tests use, read from a clone, and whether they are here.

    python tests/compat/megatron_names.py CLONE [--missing]

A name is what an import binds, or what is reached through an imported module: `megatron.core.parallel_state.get_data_parallel_rank`
after `from megatron.core import parallel_state`. A name whose call only raises counts as missing.
"""

import argparse
import ast
import subprocess
from collections.abc import Iterator

from megatron.porting.judge_fork_names_and_flags import find, only_raises
from megatron.porting.names_used_by_fork import dotted

SCRIPTS = ["pretrain_gpt.py", "pretrain_bert.py"]
LOOP = ["examples/run_simple_mcore_train_loop.py"]
UNITS = [
    f"tests/unit_tests/{folder}" for folder in ("tensor_parallel", "pipeline_parallel", "data", "transformer", "models")
]
# A tag -> the files and folders whose names count.
SOURCES = {
    "v2.5": SCRIPTS,
    "23.04": SCRIPTS,
    "core_v0.5.0": [*SCRIPTS, *UNITS],
    "core_v0.12.0": LOOP,
    "core_v0.16.1": LOOP,
}


def files(clone: str, tag: str, places: list[str]) -> Iterator[str]:
    """The texts of Python files of a tag."""
    listed = ["git", "-C", clone, "ls-tree", "-r", "--name-only", tag, *places]
    for path in subprocess.run(listed, capture_output=True, text=True, check=True).stdout.split():
        if path.endswith(".py"):
            show = ["git", "-C", clone, "show", f"{tag}:{path}"]
            yield subprocess.run(show, capture_output=True, text=True, check=True).stdout


def modules(clone: str, tag: str) -> set[str]:
    """The modules of a tag's package, and what it calls one of them besides."""
    listed = ["git", "-C", clone, "ls-tree", "-r", "--name-only", tag, "megatron"]
    paths = subprocess.run(listed, capture_output=True, text=True, check=True).stdout.split()
    names = {path.removesuffix(".py").replace("/", ".") for path in paths if path.endswith(".py")}
    return {name.removesuffix(".__init__") for name in names} | {"megatron.core.mpu"}


def names_in(text: str, modules: set[str]) -> set[str]:
    """Full names of Megatron that a file binds or reaches through its modules."""
    tree, bound, found = ast.parse(text), {}, set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for one in node.names:
                bound[one.asname or one.name.split(".")[0]] = one.name if one.asname else one.name.split(".")[0]
                found.add(one.name)
        elif isinstance(node, ast.ImportFrom) and node.module:
            for one in node.names:
                bound[one.asname or one.name] = f"{node.module}.{one.name}"
                found.add(f"{node.module}.{one.name}")
    for node in ast.walk(tree):
        first, *rest = dotted(node).split(".")
        parts = bound.get(first, "").split(".") + rest
        known = max((i for i in range(len(parts) + 1) if ".".join(parts[:i]) in modules), default=len(parts))
        found.add(".".join(parts[: known + 1]))
    return {name for name in found if name.startswith("megatron.") and "*" not in name}


def used_names(clone: str) -> dict[str, list[str]]:
    """Each public name -> the tags that use it."""
    users: dict[str, list[str]] = {}
    for tag, places in SOURCES.items():
        known = modules(clone, tag)
        for name in sorted({name for text in files(clone, tag, places) for name in names_in(text, known)}):
            if not any(part.startswith("_") for part in name.split(".")):
                users.setdefault(name, []).append(tag)
    return users


def missing(names: list[str]) -> dict[str, str]:
    """Each name that is not here -> what was said."""
    why = {}
    for name in names:
        try:
            if only_raises(find(name)):
                why[name] = "its call only raises"
        except (ImportError, AttributeError) as error:
            why[name] = str(error)
    return why


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("clone")
    asked = parser.parse_args()
    users = used_names(asked.clone)
    gone = missing(list(users))
    print(f"{len(users) - len(gone)} of {len(users)} names are here")
    for name, reason in gone.items():
        print(f"{name:80} {' '.join(users[name]):30} {reason[:90]}")
