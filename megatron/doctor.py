"""Tell what of a script or a fork of Megatron-LM is here: `python -m megatron.doctor SCRIPT_OR_FOLDER [--json]`.

It reads the names that the Python files import from `megatron` or reach through an imported module, with their calls, the
attributes of `get_args()`, and the flags that `.sh` and `.yaml` files pass. Nothing of the fork is imported or run. A
package `megatron` inside the folder is left out: this project's takes its place. Each name and each flag is

    there                    with the arguments that the calls give
    with other arguments     there, but a call gives an argument, or a flag a value, that is refused here
    missing                  not here, or here only to say so: an import or a call fails

The exit code is 0 if everything is there, 1 if something must change, 2 if nothing can be read.
"""

import argparse
import ast
import json
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from typing import Any

from megatron.core.base.tolerate_broken_output import print_answer
from megatron.core.base.version import version_text
from megatron.porting.flags_in_launch_scripts import FlagUse, flags_of_shell, flags_of_yaml
from megatron.porting.names_used_by_fork import OwnPackage, Use, names_of_file

_LEFT_OUT = {"megatron", "node_modules", ".git", "__pycache__", "site-packages", "build"}
_ROOM = 12  # lines of one list on the page; --json and --all have them all
_STATES = ("there", "other", "missing")
_TITLES = {"other": "with other arguments", "missing": "missing"}


def main(words: Sequence[str] | None = None) -> int:
    """Print the page or the JSON; return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m megatron.doctor",
        description=__doc__.split("\n")[0],
        epilog="The exit code is 0 if everything is there, 1 if something must change, 2 if nothing can be read.",
    )
    parser.add_argument("path", metavar="SCRIPT_OR_FOLDER", type=Path, help="a .py or .sh file, or a fork's folder")
    parser.add_argument("--json", action="store_true", help="print everything that was found, as JSON")
    parser.add_argument("--all", action="store_true", help="print long lists whole")
    parser.add_argument("--version", action="version", version=version_text(), help="print the version")
    asked = parser.parse_args(words)
    if not asked.path.exists():
        print(
            f"megatron.doctor: there is no {asked.path}; give a .py or .sh file, or a folder with some", file=sys.stderr
        )
        return 2
    found = examine(asked.path)
    if not found["python_files"] and not found["launch_files"]:
        print(f"megatron.doctor: {asked.path} has no .py, .sh or .yaml file", file=sys.stderr)
        return 2
    print_answer(f"{json.dumps(found, indent=1) if asked.json else page(found, is_whole=asked.all)}\n")
    entries = [*found["names"], *found["flags"]]
    return int(any(entry["state"] != "there" and not entry["is_optional"] for entry in entries))


def examine(path: Path) -> dict[str, Any]:
    """Return what a script or a folder uses: {"names", "flags", ...}, each entry with its state and what to change."""
    python_files, launch_files, left_out = files_of(path)
    root = path if path.is_dir() else path.parent
    own = OwnPackage(left_out, root)
    uses: list[Use] = []
    unreadable = []
    flags_of_fork: set[str] = set()
    set_attributes: set[str] = set()
    for file in python_files:
        try:
            found = names_of_file(file, root)
        except (SyntaxError, ValueError, RecursionError) as error:
            unreadable.append(f"{file.relative_to(root)}: {error}")
            continue
        uses += found.uses
        flags_of_fork |= found.added_flags
        set_attributes |= found.set_attributes
    flag_uses: list[FlagUse] = []
    other_programs: Counter[str] = Counter()
    for file in launch_files:
        text = file.read_text(encoding="utf-8", errors="replace")
        read = flags_of_shell if file.suffix == ".sh" else flags_of_yaml
        found_flags, others = read(text, str(file.relative_to(root)))
        flag_uses += found_flags
        other_programs.update(others)
    judge = import_module(
        "megatron.porting.judge_fork_names_and_flags"
    )  # imports torch, which --help need not wait for
    return {
        "path": str(path),
        "python_files": len(python_files),
        "launch_files": len(launch_files),
        "left_out": len(left_out),
        "unreadable": unreadable,
        "other_programs": dict(other_programs),
        "names": [asdict(entry) for entry in judge.judge_names(uses, flags_of_fork, own, set_attributes)],
        "flags": [asdict(entry) for entry in judge.judge_flags(flag_uses, flags_of_fork, own)],
    }


def files_of(path: Path) -> tuple[list[Path], list[Path], list[Path]]:
    """Return the Python files, the launch files, and the Python files of packages `megatron`, which are left out.

    A script brings the modules beside it that it imports.
    """
    if path.is_file():
        if path.suffix in (".sh", ".yaml", ".yml"):
            return [], [path], []
        return with_neighbours(path), [], []
    files = [file for file in sorted(path.rglob("*")) if file.is_file()]
    inside = {file for file in files if _LEFT_OUT & set(file.relative_to(path).parts[:-1])}
    read = [file for file in files if file not in inside]
    python_files = [file for file in read if file.suffix == ".py"]
    launch_files = [file for file in read if file.suffix in (".sh", ".yaml", ".yml")]
    return (
        python_files,
        launch_files,
        sorted(file for file in inside if file.suffix == ".py" and "megatron" in file.relative_to(path).parts[:-1]),
    )


def with_neighbours(script: Path) -> list[Path]:
    """Return a script and, after it, the files in its folder that it imports, also through one another."""
    files = [script]
    for file in files:
        try:
            tree = ast.parse(file.read_bytes())
        except (SyntaxError, ValueError):
            continue
        for node in ast.walk(tree):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.module and not node.level:
                names = [node.module]
            for name in names:
                neighbour = script.parent / f"{name.replace('.', '/')}.py"
                if name.split(".")[0] != "megatron" and neighbour.is_file() and neighbour not in files:
                    files.append(neighbour)
    return files


def page(found: dict[str, Any], *, is_whole: bool = False) -> str:
    """Return the page that a person reads."""
    left_out = found["left_out"]
    own = f"; {left_out} of its own package megatron are left out, this project's takes its place" if left_out else ""
    lines = [
        f"{found['path']}: {found['python_files']} Python files and {found['launch_files']} launch files{own}",
        "",
        f"{'':8}{'used':>6}{'there':>8}{'other':>8}{'missing':>9}",
    ]
    for kind in ("names", "flags"):
        counts = Counter(entry["state"] for entry in found[kind])
        there, other, missing = (counts[state] for state in _STATES)
        lines.append(f"{kind:8}{len(found[kind]):>6}{there:>8}{other:>8}{missing:>9}")
    for kind in ("names", "flags"):
        for state, title in _TITLES.items():
            entries = sorted(
                (entry for entry in found[kind] if entry["state"] == state),
                key=lambda entry: (-len(entry["where"]), entry["name"]),
            )
            if not entries:
                continue
            lines += ["", f"{kind.capitalize()} {title}:"]
            shown = entries if is_whole else entries[:_ROOM]
            for entry in shown:
                more = f" and {len(entry['where']) - 1} more" if len(entry["where"]) > 1 else ""
                lines += [f"  {entry['name']}   ({entry['where'][0]}{more})", f"      {entry['change']}"]
            if len(shown) < len(entries):
                lines.append(f"  ... and {len(entries) - len(shown)} more; --all lists them")
    if found["unreadable"]:
        lines += ["", "Not Python of this version:", *(f"  {line}" for line in found["unreadable"])]
    lines += ["", "docs/coming_from_megatron.md has what runs unchanged, docs/flags.md every flag."]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
