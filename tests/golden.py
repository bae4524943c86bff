"""A golden record: every number that a change of structure must leave as it was, to the bit.

    python tests/golden.py record before.json       at the commit before the change
    python tests/golden.py record after.json        at the change, on the same machine
    python tests/golden.py compare before.json after.json

    --only layout,zero/dp2      groups of entries, or whatever their names begin with (tests/golden_entries.py says what they are)
    --quick                     one or two of each group, in a minute: for every commit; compare has --shared for a part of a record

Where the change moves or renames modules, the tests change with them; so that they do not change the record, it can be taken by the
tests of an earlier commit:

    python tests/golden.py record after.json --harness PARENT [--product COMMIT_OR_FOLDER]

runs tests/ of PARENT in a copy of the product (this checkout by default), whose tests/renamed_modules.json says where each module
that they import is now (`renamed_modules`). What --help prints is meant to change: it is compared with --help-too.

Bits depend on the machine, its number of threads (one here) and the release of torch: a record is compared with one of the same
machine, and none is kept in the repository. A change that is meant to change numbers names the entries that it changes.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
TABLE = "renamed_modules.json"


# ---------------------------------------------------------------- a record


def chosen_names(names: Iterable[str], only: str, quick: bool) -> list[str]:
    """only: what names begin with, separated by commas; empty for all. quick: of each group the first entry and the middle one."""
    begins = tuple(word for word in only.split(",") if word)
    chosen = [name for name in names if not begins or name.startswith(begins)]
    if not quick:
        return chosen
    groups: dict[str, list[str]] = {}
    for name in chosen:
        groups.setdefault(name.split("/")[0], []).append(name)
    return [name for group in groups.values() for name in dict.fromkeys((group[0], group[len(group) // 2]))]


def record(makers: dict[str, Callable[[], Any]], processes: int) -> tuple[dict[str, Any], list[str]]:
    """The values of these entries, each made in a process of its own that is forked from this one; the names of those that failed."""
    made: dict[str, Any] = {}
    failed: list[str] = []
    waiting, running = list(makers), {}
    with tempfile.TemporaryDirectory() as folder:
        try:
            while waiting or running:
                while waiting and len(running) < processes:
                    name = waiting.pop(0)
                    output = Path(folder) / str(len(waiting))
                    running[_forked(makers[name], output)] = name, output, time.monotonic()
                pid, status = os.wait()
                name, output, began = running.pop(pid)
                if status:
                    failed.append(name)
                    print(f"{output.with_suffix('.said').read_text()[-4000:]}\nFAILED: {name}", file=sys.stderr)
                else:
                    made[name] = json.loads(output.read_text())
                done = f"{len(made) + len(failed)} of {len(makers)}: {name}"
                print(f"{done}  {time.monotonic() - began:.1f} s", file=sys.stderr, flush=True)
        finally:
            for pid in running:
                os.kill(pid, 9)
                os.waitpid(pid, 0)
    return {name: made[name] for name in makers if name in made}, failed


def _forked(make: Callable[[], Any], output: Path) -> int:
    """The process that writes the value to a file, and what is printed meanwhile to another."""
    pid = os.fork()
    if pid:
        return pid
    with output.with_suffix(".said").open("w") as said:
        try:
            os.dup2(said.fileno(), 1)
            os.dup2(said.fileno(), 2)
            sys.stdout = sys.stderr = said
            output.write_text(json.dumps(make()))
            code = 0
        except BaseException:
            traceback.print_exc()
            code = 1
        said.flush()
        os._exit(code)


def loaded_from_elsewhere(roots: Iterable[Path]) -> list[str]:
    """The files of modules that lie in none of these folders: of another checkout, which an editable install may name."""
    inside = tuple(f"{root}{os.sep}" for root in roots)
    files = (getattr(module, "__file__", None) for module in list(sys.modules.values()))
    return sorted({file for file in files if file and os.path.isabs(file) and not file.startswith(inside)})


def record_here(output: Path, only: str, quick: bool, processes: int) -> int:
    """By the tests beside this file, of the code beside their folder. 1 if entries are missing, which failed."""
    sys.path[:0] = [str(ROOT / folder) for folder in ("tests", "tests/support", "tests/campaigns", "")]
    import torch
    from golden_entries import entries

    torch.set_num_threads(1)
    roots = [ROOT, sys.prefix, sys.base_prefix, os.environ.get("RENAMED_MODULES_SITE", ROOT)]
    if elsewhere := loaded_from_elsewhere(map(Path, roots)):
        sys.exit(f"not of {ROOT}: {' '.join(elsewhere)}")
    makers = dict(entries())
    names = chosen_names(makers, only, quick)
    began = time.monotonic()
    made, failed = record({name: makers[name] for name in names}, processes)
    output.write_text(json.dumps(made, indent=1) + "\n")
    print(f"wrote {output}: {len(made)} entries in {time.monotonic() - began:.0f} s")
    if failed:
        print(f"FAILED: {' '.join(failed)}")
    return 1 if failed else 0


# ---------------------------------------------------------------- a record of a product by the tests of another commit


def put_copy(source: str, folder: Path, part: str = ".") -> None:
    """Files of a commit of this repository, or of another checkout as they are now without those that git ignores."""
    if not Path(source).is_dir():
        command = ["git", "-C", str(ROOT), "archive", "--format=tar", source, part]
        archive = subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout
        subprocess.run(["tar", "-x", "-C", str(folder)], input=archive, check=True)
        return
    checkout = Path(source).resolve()
    command = ["git", "-C", str(checkout), "ls-files", "-z", "--cached", "--others", "--exclude-standard", part]
    for name in subprocess.run(command, check=True, capture_output=True, text=True).stdout.split("\0"):
        if name and (checkout / name).is_file():  # git names deleted files too
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(checkout / name, folder / name)


def assemble(product: str, harness: str, folder: Path) -> dict[str, str]:
    """A copy of the product with other tests in place of its own; the environment that these run in."""
    folder.mkdir()
    put_copy(product, folder)
    table = folder.parent / TABLE
    theirs = folder / "tests" / TABLE
    table.write_text(theirs.read_text() if theirs.exists() else "{}")
    shutil.rmtree(folder / "tests")
    put_copy(harness, folder, "tests")
    return environment_of(folder, table, folder.parent / "site")


def environment_of(root: Path, table: Path, site: Path) -> dict[str, str]:
    """In which every Python process finds the code under `root`, and the modules of the table by their old names."""
    site.mkdir()
    shutil.copy2(ROOT / "tests" / "renamed_modules.py", site)
    (site / "sitecustomize.py").write_text("import renamed_modules\n\nrenamed_modules.install_from_environment()\n")
    return os.environ | {
        "PYTHONPATH": os.pathsep.join((str(site), str(root))),
        "RENAMED_MODULES": str(table),
        "RENAMED_MODULES_ROOT": str(root),
        "RENAMED_MODULES_SITE": str(site),
    }


def record_elsewhere(product: str, harness: str, arguments: list[str]) -> int:
    with tempfile.TemporaryDirectory(prefix="golden-") as temporary:
        root = Path(temporary).resolve() / "product"
        environment = assemble(product, harness, root)
        command = [sys.executable, str(root / "tests" / "golden.py"), "record", *arguments]
        return subprocess.run(command, env=environment).returncode


# ---------------------------------------------------------------- two records


def differences(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """The entries that are not equal, with the parts of each that differ."""
    found = []
    for name in sorted(before.keys() | after.keys()):
        if name not in after or name not in before:
            found.append(f"{name}: only {'before' if name in before else 'after'}")
        elif before[name] != after[name]:
            found.append(f"{name}: {', '.join(_parts_that_differ(before[name], after[name])) or 'the text'}")
    return found


def _parts_that_differ(before: Any, after: Any, at: str = "") -> list[str]:
    """The keys, to two levels, under which two values differ."""
    if not (isinstance(before, dict) and isinstance(after, dict)) or at.count("/") >= 2:
        return [at.strip("/")] if before != after and at else []
    keys = [*before, *(key for key in after if key not in before)]
    return [
        part
        for key in keys
        if before.get(key) != after.get(key)
        for part in _parts_that_differ(before.get(key), after.get(key), f"{at}/{key}")
    ]


def compare(before: dict[str, Any], after: dict[str, Any], help_too: bool) -> int:
    """Say what differs; 1 if it must not."""
    found = differences(before, after)
    texts = [] if help_too else [line for line in found if line.startswith("help/")]
    failing = [line for line in found if line not in texts]
    print("\n".join([*failing, f"{len(failing)} of {len(before.keys() | after.keys())} entries differ"]))
    if texts:
        print(f"help texts differ, which is no failure without --help-too: {len(texts)}")
    return 1 if failing else 0


def main(arguments: list[str] | None = None) -> int:
    """0 if a record was made or two are equal, 1 if they differ."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    recording = commands.add_parser("record", help="write the record of this code, or of another product")
    recording.add_argument("output", type=Path)
    recording.add_argument("--only", default="", metavar="GROUP[,GROUP]", help="entries whose names begin so")
    recording.add_argument("--quick", action="store_true", help="one or two entries of each group")
    recording.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    recording.add_argument("--product", metavar="COMMIT_OR_FOLDER", help="whose numbers; default: this checkout's")
    recording.add_argument("--harness", metavar="COMMIT_OR_FOLDER", help="whose tests record; default: HEAD's")
    comparing = commands.add_parser("compare", help="say which entries of two records differ")
    comparing.add_argument("before", type=Path)
    comparing.add_argument("after", type=Path)
    comparing.add_argument(
        "--shared", action="store_true", help="only the entries of both: one may be a part, as of --quick"
    )
    comparing.add_argument("--help-too", action="store_true", help="fail if what --help prints differs")
    given = parser.parse_args(arguments)
    if given.command == "compare":
        before, after = (json.loads(path.read_text()) for path in (given.before, given.after))
        if given.shared:
            shared = before.keys() & after.keys()
            before, after = ({name: one[name] for name in shared} for one in (before, after))
        if not before:
            sys.exit("there is nothing to compare")
        return compare(before, after, given.help_too)
    if given.product is None and given.harness is None:
        return record_here(given.output, given.only, given.quick, given.processes)
    again = [str(given.output.resolve()), "--only", given.only, "--processes", str(given.processes)]
    return record_elsewhere(given.product or str(ROOT), given.harness or "HEAD", again + ["--quick"] * given.quick)


if __name__ == "__main__":
    sys.exit(main())
