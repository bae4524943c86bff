"""The public names that Megatron's own scripts and unit tests use are here.

    MEGATRON_LM_PATH=CLONE python -m pytest tests/compat/test_moved_or_unbuilt_megatron_names.py -s

CLONE: as in test_megatron_scripts.py.
"""

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent))
from megatron_names import SOURCES, missing, used_names

CLONE = os.environ.get("MEGATRON_LM_PATH")
pytestmark = pytest.mark.skipif(
    CLONE is None or not Path(CLONE).is_dir(),
    reason="MEGATRON_LM_PATH names no clone of Megatron-LM; see the head of this file",
)
SHARE = 0.9  # at least, of the names


def test_the_names_that_megatrons_scripts_and_tests_use_are_here():
    users = used_names(CLONE)
    gone = missing(list(users))
    for tag in SOURCES:
        used = [name for name, tags in users.items() if tag in tags]
        print(f"\n{tag}: {len(used) - sum(name in gone for name in used)} of {len(used)} names", end="")
    print(f"\nall: {len(users) - len(gone)} of {len(users)} names; missing:")
    print("\n".join(f"    {name}: {reason}" for name, reason in gone.items()))
    assert len(users) - len(gone) >= SHARE * len(users)


RELEASES = ("v2.5", "v2.6", "23.04", "core_v0.4.0", "core_v0.8.0", "core_v0.12.0", "core_v0.16.1")
PARTED_RELEASES = RELEASES[4:]  # whose flat paths went to packages
NOT_NAMES = {"code", "index"}  # of `megatron.data.indexed_dataset` (a table of dtypes) and of a server's page


def git(*words: str) -> str:
    return subprocess.run(["git", "-C", str(CLONE), *words], check=True, capture_output=True, text=True).stdout


def public_names(tag: str) -> Iterator[tuple[str, str]]:
    """(module, name) of the functions and classes outside of core that this release defines."""
    for path in git("ls-tree", "-r", "--name-only", tag, "megatron").split():
        if (
            not path.endswith(".py")
            or path.startswith(("megatron/core/", "megatron/fused_kernels/"))
            or "/test" in path
        ):
            continue
        if (
            not path.startswith(("megatron/legacy/", "megatron/training/", "megatron/inference/"))
            and tag in PARTED_RELEASES
        ):
            continue  # further packages beside them, such as `post_training` and `rl`
        module = path.removesuffix(".py").replace("/", ".").removesuffix(".__init__")
        for node in ast.parse(git("show", f"{tag}:{path}")).body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
                yield module, node.name


@pytest.mark.parametrize("tag", RELEASES)
def test_every_public_name_outside_of_core_can_be_imported(tag: str):
    missing_names = [
        f"{module}.{name}"
        for module, name in public_names(tag)
        if name not in NOT_NAMES and "fused_kernels" not in module and not hasattr(import_module(module), name)
    ]
    assert not missing_names
