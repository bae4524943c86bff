"""Facts of Megatron's releases: the flags of each release's own `add_megatron_arguments`, read by running that parser from a clone.

    python tests/campaigns/megatron_flag_facts.py CLONE tests/megatron_flags.json [--folder FOLDER]

A line each: [flag, [[attribute, number of values, type, choices, default, value of a switch, first release, last release]]], with
a row for each form that the flag had. Releases stand in the first line, oldest first; a form holds for all from the first to
the last. FOLDER keeps the files of the releases.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
TAGS = (
    *("core_v0.12.0", "core_v0.12.1", "core_v0.12.2", "core_v0.12.3", "core_v0.13.0", "core_v0.13.1", "core_v0.14.0"),
    *("core_v0.15.0", "core_v0.15.1", "core_v0.15.2", "core_v0.15.3", "core_v0.16.0", "core_v0.16.1", "core_v0.17.0"),
    *("core_v0.17.1", "core_v0.18.0", "core_v0.18.2", "core_v0.19.0"),
)


def flags_of_release(tree: Path) -> list[list[Any]]:
    """Return the flags of the release in `tree`, as megatron_arguments.py writes them."""
    script = ROOT / "tests/compat/megatron_arguments.py"
    python = [sys.executable, "-W", "ignore", "-I", str(script), str(tree), "--flags"]
    answer = subprocess.run(python, capture_output=True, text=True, check=False)
    if answer.returncode:
        raise SystemExit(f"{tree.name}: {answer.stderr[-2000:]}")
    return json.loads(answer.stdout.splitlines()[-1])


def unpacked(clone: str, tag: str, folder: Path) -> Path:
    """Return the folder with the files of a release, unpacked if it is not there."""
    tree = folder / tag
    if not tree.exists():
        tree.mkdir(parents=True)
        archive = subprocess.run(["git", "-C", clone, "archive", tag], capture_output=True, check=True)
        subprocess.run(["tar", "-x", "-C", str(tree)], input=archive.stdout, check=True)
    return tree


def facts(clone: str, folder: Path) -> dict[str, list[list[Any]]]:
    """Return flag -> its forms, each with the releases that have it."""
    written: dict[str, list[list[Any]]] = {}
    for index, tag in enumerate(TAGS):
        release = tag.removeprefix("core_v")
        before = TAGS[index - 1].removeprefix("core_v")
        for flag, *form in flags_of_release(unpacked(clone, tag, folder)):
            forms = written.setdefault(flag, [])
            if forms and forms[-1][:-2] == form and forms[-1][-1] == before:
                forms[-1][-1] = release
            else:
                forms.append([*form, release, release])
    return written


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("clone")
    parser.add_argument("output", type=Path)
    parser.add_argument("--folder", type=Path)
    asked = parser.parse_args()
    found = facts(asked.clone, asked.folder or Path(tempfile.mkdtemp()))
    lines = [json.dumps([tag.removeprefix("core_v") for tag in TAGS])]
    lines += [json.dumps([flag, found[flag]]) for flag in sorted(found)]
    asked.output.write_text("[\n" + ",\n".join(lines) + "\n]\n")
    print(f"{len(found)} flags of {len(TAGS)} releases")
