"""Megatron-style pretraining. Names that Megatron 2.x scripts import from here are found in their new modules.

    core       the parts that training is made of; each can be used without the rest
    training   the command line and the loop
    report     versions and devices, for a bug report (`python -m megatron.report`)

May import: `core` imports nothing of `training`, and both import nothing of the scripts and tools.
To add a file: docs/architecture.md has the floors, and tests/test_architecture.py enforces them.
"""

import os


def _check_unmixed(folder: str) -> None:
    """Raise ImportError if this folder holds files of megatron-core too, or lacks what its uninstallation took away.

    Its package is also named `megatron`, so pip merges the files of both, and the later overwrites those of the same
    names. The
    disk shows that before any file runs: core/package_info.py says whose it is, core/jit.py is a file of theirs alone,
    and their
    metadata lie beside the package. Elsewhere on the path megatron-core is harmless: it has no `megatron/__init__.py`,
    so Python
    finds this folder.
    """
    core = os.path.join(folder, "core")
    around = os.path.dirname(folder)
    info = os.path.join(core, "package_info.py")
    is_theirs = False
    if os.path.exists(info):
        with open(info, encoding="utf-8") as file:
            is_theirs = "megatron-anywhere" not in file.read()
    metadata = sorted(name for name in os.listdir(around) if name.startswith("megatron_core-"))
    if is_theirs or metadata or os.path.exists(os.path.join(core, "jit.py")):
        raise ImportError(
            f"{folder} holds the files of two projects, megatron-anywhere and megatron-core "
            f"({', '.join(os.path.join(around, name) for name in metadata) or core}): both call their package `megatron`, "
            "and either may have overwritten files of the other. Run `pip uninstall --yes megatron-core megatron-anywhere`, "
            "then install one of them again; to use both, install each in its own virtual environment"
        )
    for name in ("__init__.py", "package_info.py"):
        if not os.path.exists(os.path.join(core, name)):
            raise ImportError(
                f"{folder} lacks core/{name}: `pip uninstall megatron-core` removes the files that both projects have; run "
                "`pip install --force-reinstall --no-deps megatron-anywhere` from the same source"
            )


_check_unmixed(os.path.dirname(__file__))

from megatron.core.base.lazy_imports import lazy_names  # noqa: E402  (it may be another's)

__getattr__, __dir__ = lazy_names(
    __name__, {".training.global_vars": "get_args get_timers get_tokenizer is_last_rank print_rank_0 print_rank_last"}
)
