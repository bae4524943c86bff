"""The public names that Megatron's own scripts and unit tests use are here.

    MEGATRON_LM_PATH=CLONE python -m pytest tests/compat/test_moved_or_unbuilt_megatron_names.py -s

CLONE: as in test_megatron_scripts.py.
"""

import ast
import io
import os
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent))
from megatron_names import SOURCES, missing, used_names
from public_names import statements

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


def files_of(tag: str) -> Iterator[tuple[str, str]]:
    """(path, text) of the Python files of a release's package."""
    packed = subprocess.run(
        ["git", "-C", str(CLONE), "archive", "--format=tar", tag, "megatron"], check=True, capture_output=True
    )
    with tarfile.open(fileobj=io.BytesIO(packed.stdout)) as archive:
        for member in archive:
            if member.name.endswith(".py") and "/test" not in member.name:
                yield member.name, archive.extractfile(member).read().decode()


def module_of(path: str) -> str:
    """megatron/core/__init__.py -> megatron.core"""
    return path.removesuffix(".py").replace("/", ".").removesuffix(".__init__")


def public_names(tag: str) -> Iterator[tuple[str, str]]:
    """(module, name) of the functions and classes outside of core that this release defines."""
    for path, text in files_of(tag):
        if path.startswith(("megatron/core/", "megatron/fused_kernels/")):
            continue
        if (
            not path.startswith(("megatron/legacy/", "megatron/training/", "megatron/inference/"))
            and tag in PARTED_RELEASES
        ):
            continue  # further packages beside them, such as `post_training` and `rl`
        for node in ast.parse(text).body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
                yield module_of(path), node.name


@pytest.mark.parametrize("tag", RELEASES)
def test_every_public_name_outside_of_core_can_be_imported(tag: str):
    missing_names = [
        f"{module}.{name}"
        for module, name in public_names(tag)
        if name not in NOT_NAMES and "fused_kernels" not in module and not hasattr(import_module(module), name)
    ]
    assert not missing_names


CORE_RELEASES = ("23.04", "core_v0.4.0", "core_v0.6.0", "core_v0.8.0", "core_v0.10.0", "core_v0.12.0", "core_v0.14.0")
CORE_RELEASES += ("core_v0.16.1", "core_v0.17.1", "core_v0.18.2", "core_v0.19.0")


def names_of_core(path: str, text: str) -> Iterator[str]:
    """The public functions and classes of a file, also inside `try` and `if`; of a package, what it imports from Megatron besides."""
    for node in statements(ast.parse(text).body):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        is_import = isinstance(node, ast.ImportFrom) and path.endswith("__init__.py")
        if is_import and (node.level or (node.module or "").startswith("megatron")):
            yield from (alias.asname or alias.name for alias in node.names)


@pytest.mark.parametrize("tag", CORE_RELEASES)
def test_every_public_name_of_core_can_be_imported(tag: str):
    missing_names = []
    for path, text in files_of(tag):
        if not path.startswith("megatron/core/"):
            continue
        module = import_module(module_of(path))
        for name in names_of_core(path, text):
            if name.startswith("_") or name == "*" or hasattr(module, name):
                continue
            try:
                import_module(f"{module.__name__}.{name}")
            except ImportError:
                missing_names.append(f"{module_of(path)}.{name}")
    assert not missing_names
