"""List the commands, or run one: `python -m megatron`, `python -m megatron plot-schedule --all`.

`python -m megatron NAME ...` is the console command `megatron-NAME ...`. `python -m megatron examples` prints the folder with
the examples and recipes, in a checkout as in an installed wheel.
"""

import ast
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from megatron.console_scripts import programs_folder
from megatron.core.base.version import version_text

_EXAMPLES = "the folder with the examples and recipes that the documents name"
_MODULES = ("configure", "doctor", "on_cpu", "report")  # of this package, which are commands too


class Command(NamedTuple):
    """A command: its name, the file that it runs, and the first sentence of that file."""

    name: str
    path: Path
    purpose: str


def commands() -> Iterator[Command]:
    """Yield the commands: first those that train, then the tools, by name."""
    folder = programs_folder()
    modules = [Path(__file__).with_name(f"{name}.py") for name in _MODULES]
    tools = {path.stem: path for path in [*modules, *sorted((folder / "tools").glob("*.py"))]}
    paths = [*sorted(folder.glob("pretrain_*.py")), *(tools[name] for name in sorted(tools))]
    for path in paths:
        source = path.read_text(encoding="utf-8")
        if 'if __name__ == "__main__":' in source:
            first_line = ast.get_docstring(ast.parse(source)).splitlines()[0]
            yield Command(path.stem.replace("_", "-"), path, first_line.split(". ")[0].rstrip(".:"))


def main(words: list[str]) -> int:
    """Print the list, or replace this process by the program of the command; return the exit status."""
    if not words or words[0] in ("-h", "--help"):
        found = list(commands())
        width = max(len(command.name) for command in found)
        print(
            f"{version_text()}: python -m megatron NAME [flags], or megatron-NAME [flags]; --help of each lists its flags\n"
        )
        print("\n".join(f"  {command.name:<{width}}  {command.purpose}" for command in found))
        print(f"\npython -m megatron examples: {_EXAMPLES}")
        return 0
    if words[0] == "--version":
        print(version_text())
        return 0
    if words == ["examples"]:
        print(programs_folder() / "examples")
        return 0
    name = words[0].removeprefix("megatron-").replace("_", "-")
    paths = {command.name: command.path for command in commands()}
    if name not in paths:
        print(f"megatron: {words[0]} is none of the commands {', '.join(paths)}", file=sys.stderr)
        return 2

    program = ["-m", f"megatron.{paths[name].stem}"] if paths[name].stem in _MODULES else [str(paths[name])]
    os.execv(sys.executable, [sys.executable, *program, *words[1:]])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
