"""The programs as console commands: `megatron-preprocess-data ...` is `python tools/preprocess_data.py ...`.

A command's name is its program's, after `megatron-` and with hyphens. The programs lie in a checkout's root and its
tools/; a wheel has them in megatron/_programs, laid out as there (setup.py). Several processes: `torchrun
--nproc-per-node 4 --no-python megatron-pretrain-gpt ...`.
"""

import os
import sys
from pathlib import Path
from typing import NoReturn

_PACKAGE = Path(__file__).resolve().parent


def programs_folder(package: Path = _PACKAGE) -> Path:
    """Where pretrain_gpt.py and tools/ are: in the package of a wheel, else beside it."""
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
    """Runs the program of the command that was called, in place of this process, so that signals and exit codes are its own."""
    program = program_of(sys.argv[0], programs_folder())
    os.execv(sys.executable, [sys.executable, str(program), *sys.argv[1:]])
