"""Draws public names that are shown with their signatures alone to readers who do not know the code.

    python tests/campaigns/blind_names.py PARENT END FOLDER      # 40 names of each commit, mixed
    python tests/campaigns/blind_names.py --all END FOLDER       # every name of one commit, to look for unclear ones

The seed stands here since before the first draw. FOLDER/names.txt has the numbered names, without their commits: each of two
readers who know Megatron and PyTorch, and have not seen the code, writes one sentence a name. FOLDER/key.json says which commit
each is of: a third reader, who is not told which commit is the later one, compares each sentence with the code.

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

SEED = 20261129
OF_EACH = 40


def product_files(commit: str) -> list[str]:
    """Return the public modules of the product, in a fixed order."""
    listed = subprocess.run(
        ["git", "ls-tree", "-r", "--name-only", commit, "megatron"], check=True, capture_output=True, text=True
    )
    files = sorted(name for name in listed.stdout.split() if name.endswith(".py"))
    return [name for name in files if not any(_is_private(part) for part in Path(name).with_suffix("").parts)]


def _is_private(name: str) -> bool:
    return name.startswith("_") and name != "__init__"


def public_names(commit: str) -> list[str]:
    """Return "module.name(signature) -> result" of every public function and class that a commit defines."""
    names = []
    for file in product_files(commit):
        text = subprocess.run(["git", "show", f"{commit}:{file}"], check=True, capture_output=True, text=True).stdout
        module = file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        for node in ast.parse(text).body:
            if isinstance(node, ast.FunctionDef) and not _is_private(node.name):
                names.append(f"{module}.{node.name}{_signature(node)}")
            elif isinstance(node, ast.ClassDef) and not _is_private(node.name):
                names.append(f"class {module}.{node.name}{_constructor(node)}")
    return names


def _signature(function: ast.FunctionDef, *, skip_self: bool = False) -> str:
    arguments = function.args
    if skip_self:
        arguments.args = arguments.args[1:]
    result = "" if function.returns is None else f" -> {ast.unparse(function.returns)}"
    return f"({ast.unparse(arguments)}){result}"


def _constructor(cls: ast.ClassDef) -> str:
    """Return the bases and the constructor's arguments; of a dataclass or an enum, its fields."""
    bases = f"({', '.join(ast.unparse(base) for base in cls.bases)})" if cls.bases else ""
    fields = []
    for statement in cls.body:
        if isinstance(statement, ast.FunctionDef) and statement.name == "__init__":
            return f"{bases}, constructed as {_signature(statement, skip_self=True)}"
        if isinstance(statement, ast.AnnAssign) and not ast.unparse(statement.target).startswith("_"):
            fields.append(f"{ast.unparse(statement.target)}: {ast.unparse(statement.annotation)}")
    return f"{bases}, with {'; '.join(fields)}" if fields else bases


def draw(parent: str, end: str) -> list[tuple[str, str]]:
    """Return (commit, name) of all that are shown, in the order in which they are."""
    choose = random.Random(SEED)
    drawn = [(commit, name) for commit in (parent, end) for name in choose.sample(public_names(commit), OF_EACH)]
    choose.shuffle(drawn)
    return drawn


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--all", action="store_true", help="every name of END, instead of a draw")
    parser.add_argument("commits", nargs="+", metavar="COMMIT", help="PARENT and END; with --all, END")
    parser.add_argument("folder", type=Path, help="where names.txt and key.json are written")
    args = parser.parse_args()
    if len(args.commits) != (1 if args.all else 2):
        parser.error(f"given {len(args.commits)} commits; a draw needs PARENT and END, --all needs END")

    shown = [(commit, name) for commit in args.commits for name in public_names(commit)]
    if not args.all:
        shown = draw(*args.commits)
    args.folder.mkdir(parents=True, exist_ok=True)
    lines = [f"{number}. {name}" for number, (_, name) in enumerate(shown, 1)]
    (args.folder / "names.txt").write_text("\n".join(lines) + "\n")
    key = [{"number": number, "commit": commit, "name": name} for number, (commit, name) in enumerate(shown, 1)]
    (args.folder / "key.json").write_text(json.dumps(key, indent=1) + "\n")
    print(f"{len(shown)} names: {args.folder / 'names.txt'}")


if __name__ == "__main__":
    main()
