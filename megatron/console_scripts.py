"""The programs as console commands: `megatron-preprocess-data ...` is `python tools/preprocess_data.py ...`.

A command's name is its program's, after `megatron-` and with hyphens. The programs lie in a checkout's root and its
tools/; a wheel has them in megatron/_programs, laid out as there (setup.py). Several processes: `torchrun
--nproc-per-node 4 --no-python megatron-pretrain-gpt ...`.
"""

import os
import sys
from pathlib import Path
from typing import NoReturn

import megatron

_PACKAGE = Path(megatron.__file__).resolve().parent


def programs_folder(package: Path = _PACKAGE) -> Path:
    """The folder of pretrain_gpt.py and tools/: inside the package in a wheel, else its parent."""
    inside = package / "_programs"
    return inside if inside.is_dir() else package.parent


def program_of(command: str, folder: Path) -> Path:
    """The file that a console command runs."""
    name = Path(command).stem.removeprefix("megatron-").replace("-", "_") + ".py"
    found = [path for path in (folder / name, folder / "tools" / name) if path.is_file()]
    if not found:
        raise FileNotFoundError(f"{command}: there is no {name} in {folder} or its tools/; install the package again")
    return found[0]


def main() -> NoReturn:
    """Replace this process by the command's program, which then receives its signals and sets its exit code."""
    program = program_of(sys.argv[0], programs_folder())
    os.execv(sys.executable, [sys.executable, str(program), *sys.argv[1:]])
