"""Draws files whose paths alone are shown to readers who do not know the code: does a path say what the file does?

    python tests/campaigns/blind_files.py PARENT END FOLDER
    python tests/campaigns/blind_files.py PARENT END FOLDER --all        every file of END alone, in their order: no draw

Of each of two commits 20 files of the product are drawn, by a seed that stands here since before the files were moved, and mixed.
FOLDER/paths.txt has the numbered paths, without their commits: each of two readers who know Megatron and PyTorch, and have not seen
the code, writes one sentence a path. FOLDER/key.json says which commit each is of: a third reader, who gets it without the names of
the commits' order, compares each sentence with the code.

    right      whoever acts on the sentence is not misled
    partly     the right area; the main point is missing, or one claim is false
    wrong      all else
"""

import argparse
import ast
import json
import random
import subprocess
from pathlib import Path

SEED = 20261204
OF_EACH = 20
LEAST_LINES = 5  # a file of fewer lines of code only passes names on


def product_files(commit: str) -> list[str]:
    """The files of the package with code of their own, in a fixed order."""
    listed = subprocess.run(
        ["git", "ls-tree", "-r", "--name-only", commit, "megatron"], check=True, capture_output=True, text=True
    )
    files = sorted(name for name in listed.stdout.split() if name.endswith(".py") and not name.endswith("__init__.py"))
    return [name for name in files if code_lines(source(commit, name)) >= LEAST_LINES]


def source(commit: str, name: str) -> str:
    return subprocess.run(["git", "show", f"{commit}:{name}"], check=True, capture_output=True, text=True).stdout


def code_lines(text: str) -> int:
    """Lines on which a statement begins, but for docstrings and imports."""
    kinds = (ast.Import, ast.ImportFrom)
    statements = [
        node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.stmt) and not isinstance(node, kinds)
    ]
    return len({node.lineno for node in statements if not isinstance(getattr(node, "value", None), ast.Constant)})


def draw(parent: str, end: str) -> list[tuple[str, str]]:
    """(commit, path) of all that are shown, in the order in which they are."""
    choose = random.Random(SEED)
    drawn = [(commit, name) for commit in (parent, end) for name in choose.sample(product_files(commit), OF_EACH)]
    choose.shuffle(drawn)
    return drawn


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("parent", help="the commit before the files were moved")
    parser.add_argument("end", help="the commit after it")
    parser.add_argument("folder", type=Path, help="where paths.txt and key.json are written")
    parser.add_argument("--all", action="store_true", help="every file of END instead of a draw from both")
    args = parser.parse_args()
    drawn = [(args.end, name) for name in product_files(args.end)] if args.all else draw(args.parent, args.end)
    args.folder.mkdir(parents=True, exist_ok=True)
    lines = [f"{number}. {name}" for number, (_, name) in enumerate(drawn, 1)]
    (args.folder / "paths.txt").write_text("\n".join(lines) + "\n")
    key = [{"number": number, "commit": commit, "path": name} for number, (commit, name) in enumerate(drawn, 1)]
    (args.folder / "key.json").write_text(json.dumps(key, indent=1) + "\n")
    print(f"{len(drawn)} files of {args.parent} and {args.end}: {args.folder / 'paths.txt'}")


if __name__ == "__main__":
    main()
