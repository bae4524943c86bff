"""Run the programs as console commands: `megatron-preprocess-data ...` is `python tools/preprocess_data.py ...`.

A command's name is `megatron-` and the program's name with hyphens. The programs are in a checkout's root and its
tools/; a wheel has them in megatron/_programs, in the same layout (setup.py). With several processes: `torchrun
--nproc-per-node 4 --no-python megatron-pretrain-gpt ...`.
"""

import os
import sys
from pathlib import Path
from typing import NoReturn

import megatron

_PACKAGE = Path(megatron.__file__).resolve().parent


def programs_folder(package: Path = _PACKAGE) -> Path:
    """Return the folder of pretrain_gpt.py and tools/: inside the package in a wheel, else the package's parent."""
    installed = package / "_programs"
    return installed if installed.is_dir() else package.parent


def program_of(command: str, folder: Path) -> Path:
    """Return the file that a console command runs. Raises FileNotFoundError."""
    name = Path(command).stem.removeprefix("megatron-").replace("-", "_") + ".py"
    for path in (folder / name, folder / "tools" / name):
        if path.is_file():
            return path
    raise FileNotFoundError(f"{command}: there is no {name} in {folder} or in its tools/; install the package again")


def main() -> NoReturn:
    """Replace this process by the command's program, which then receives its signals and sets its exit code."""
    program = program_of(sys.argv[0], programs_folder())
    os.execv(sys.executable, [sys.executable, str(program), *sys.argv[1:]])
