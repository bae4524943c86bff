"""Megatron-style pretraining. Names that scripts of Megatron import from here are found in their new modules.

    core        the parts that training is made of; each can be used without the rest
    training    the command line and the loop
    convert     models of other projects, read and written as data
    deepspeed   DeepSpeed's names over this project's data parallelism
    legacy      Megatron's older constructors; `model`, `data`, `mpu`, `tokenizer`, `arguments`, `utils` are flat paths
    porting     scripts and forks of others, examined and tried on a CPU (`python -m megatron.doctor`, `.on_cpu`)
    report      versions and devices, for a bug report (`python -m megatron.report`)

`python -m megatron` lists the commands. `__version__` is the version of this project; `megatron.core.__version__` is the
release of megatron-core whose interface `core` follows.

tests/package_graph.py declares which package may import which.
"""

import glob
import os
from typing import TYPE_CHECKING

_OURS = '__package_name__ = "megatron-anywhere"'  # a line of our core/package_info.py
# Files of every release of megatron-core, 0.4 to 0.19, and none of ours.
_ONLY_THEIRS = ("dist_checkpointing/dict_utils.py", "models/bert/pooler.py")


def _check_unmixed(folder: str) -> None:
    """Raise ImportError if files of megatron-core lie in this folder, or if its uninstallation has taken files from it.

    Its package is also named `megatron`, so pip merges the files of both, and what is installed later overwrites the
    earlier. Read from the disk, before any file runs: whose core/package_info.py it is, files that only megatron-core
    has, and pip's record of what megatron-core installed here. Elsewhere on the path megatron-core is harmless: it has
    no `megatron/__init__.py`, so Python finds this folder.
    """
    core, around = os.path.join(folder, "core"), os.path.dirname(folder)
    info = os.path.join(core, "package_info.py")
    others = [os.path.join(core, name) for name in _ONLY_THEIRS]
    theirs = [path for path in others if os.path.exists(path)]
    if os.path.exists(info) and _OURS not in _lines(info):
        theirs.append(info)
    records = sorted(glob.glob(os.path.join(glob.escape(around), "megatron_core-*.dist-info")))
    lists_files = [any(line.startswith("megatron/core/") for line in _lines(f"{path}/RECORD")) for path in records]
    if theirs or any(lists_files):
        raise ImportError(
            f"{folder} holds the files of two projects, megatron-anywhere and megatron-core "
            f"({', '.join([*theirs, *records])}): both call their package `megatron`, "
            "and either may have overwritten files of the other. Run `pip uninstall --yes megatron-core megatron-anywhere`, "
            "then install one of them again; to use both, install each in its own virtual environment"
        )
    for path in (os.path.join(core, "__init__.py"), info):
        if not os.path.exists(path):
            raise ImportError(
                f"{folder} lacks core/{os.path.basename(path)}: `pip uninstall megatron-core` removes the files that both "
                "projects have; run `pip install --force-reinstall --no-deps megatron-anywhere` from the same source"
            )


def _lines(path: str) -> list[str]:
    """Return the lines of a file that may be missing.

    An installation in editable form, or of another tool than pip, may have no record.
    """
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read().splitlines()
    except OSError:
        return []


_check_unmixed(os.path.dirname(os.path.abspath(__file__)))

from megatron.core.base import import_hook_for_megatron_paths  # noqa: E402  (it may be another's)
from megatron.core.base.lazy_imports import lazy_names  # noqa: E402
from megatron.core.base.version import __version__ as __version__  # noqa: E402

if TYPE_CHECKING:
    from megatron.training.global_vars import (
        get_args as get_args,
        get_timers as get_timers,
        get_tokenizer as get_tokenizer,
        is_last_rank as is_last_rank,
        print_rank_0 as print_rank_0,
        print_rank_last as print_rank_last,
    )

import_hook_for_megatron_paths.install()

__getattr__, __dir__ = lazy_names(
    __name__, {".training.global_vars": "get_args get_timers get_tokenizer is_last_rank print_rank_0 print_rank_last"}
)
