"""Mixes paragraphs, help texts and error messages of two commits for readers who mark each sentence that they had to read twice.

    python tests/campaigns/blind_prose.py PARENT END FOLDER

FOLDER/paragraphs.txt has numbered texts without their commits: every paragraph of prose of README.md, docs/architecture.md,
docs/parallelism.md and docs/memory.md, and 30 help texts and 30 error messages of each commit, drawn by the seed below. A reader who
knows Megatron and PyTorch, and does not know which commit a text is of, writes "NUMBER: the sentence" for each sentence that needed
a second reading. FOLDER/key.json says which commit and file each text is of; --marks FILE counts the marks of each commit.
"""

import argparse
import ast
import json
import random
import re
import subprocess
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

SEED = 20261129
DOCUMENTS = ("README.md", "docs/architecture.md", "docs/parallelism.md", "docs/memory.md")
OF_EACH = 30
LEAST_WORDS = 6
_OPTION_CALLS = ("option", "knob")  # the latter until the files were moved
_ERRORS = re.compile(r"\w*(Error|Exception|Stopped)$")


def shown_by(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def paragraphs(text: str) -> Iterator[str]:
    """Yield the paragraphs of prose and the items of lists; not headings, tables, code and pictures."""
    without_code = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    blocks = re.split(r"\n\s*\n|\n(?=\s*(?:[-*]|\d+\.) )", without_code)
    for block in blocks:
        words = " ".join(block.split())
        if len(words.split()) >= LEAST_WORDS and not words.startswith(("#", "|", "<", "![", "    ")):
            yield words


def _as_text(node: ast.expr) -> str:
    """Return a string literal, the joined parts of an f-string with {...} for values, or ""."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(
            part.value if isinstance(part, ast.Constant) else "{" + ast.unparse(part.value) + "}"  # type: ignore[attr-defined]
            for part in node.values
        )
    return ""


def texts_of_code(commit: str) -> tuple[list[str], list[str]]:
    """Return (help texts, error messages) of the product, each in a fixed order."""
    helps: set[str] = set()
    errors: set[str] = set()
    for name in shown_by("git", "ls-tree", "-r", "--name-only", commit, "megatron").split():
        if not name.endswith(".py"):
            continue
        for node in ast.walk(ast.parse(shown_by("git", "show", f"{commit}:{name}"))):
            if isinstance(node, ast.Yield) and node.value is not None:  # problems with settings
                errors.add(_as_text(node.value))
            if not isinstance(node, ast.Call):
                continue
            called = ast.unparse(node.func).rpartition(".")[2]
            if called in _OPTION_CALLS and len(node.args) > 1:
                helps.add(_as_text(node.args[1]))
            elif _ERRORS.match(called) and node.args:
                errors.add(_as_text(node.args[0]))
    return tuple(sorted(text for text in texts if len(text.split()) >= LEAST_WORDS) for texts in (helps, errors))  # type: ignore[return-value]


def draw(commits: tuple[str, str]) -> list[dict[str, str]]:
    choose = random.Random(SEED)
    drawn = []
    for commit in commits:
        for name in DOCUMENTS:
            text = shown_by("git", "show", f"{commit}:{name}")
            drawn += [{"commit": commit, "from": name, "text": words} for words in paragraphs(text)]
        for kind, texts in zip(("help", "error"), texts_of_code(commit)):
            drawn += [{"commit": commit, "from": kind, "text": text} for text in choose.sample(texts, OF_EACH)]
    choose.shuffle(drawn)
    return drawn


def count_marks(key: list[dict[str, str]], marks: str) -> str:
    """Return a table of marked sentences by commit and place."""
    counts = Counter()
    for line in marks.splitlines():
        if match := re.match(r"\s*(\d+)\s*[:.]", line):
            entry = key[int(match[1]) - 1]
            counts[entry["commit"], entry["from"]] += 1
    shown = Counter((entry["commit"], entry["from"]) for entry in key)
    rows = [
        f"{commit:12} {place:24} {counts[commit, place]:4} marks in {n:4} texts" for (commit, place), n in shown.items()
    ]
    return "\n".join(sorted(rows))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("parent", help="the earlier commit")
    parser.add_argument("end", help="the later commit")
    parser.add_argument("folder", type=Path, help="where paragraphs.txt and key.json are written")
    parser.add_argument("--marks", type=Path, help="count the marks of a reader instead")
    args = parser.parse_args()
    if args.marks is not None:
        print(count_marks(json.loads((args.folder / "key.json").read_text()), args.marks.read_text()))
        return
    drawn = draw((args.parent, args.end))
    args.folder.mkdir(parents=True, exist_ok=True)
    lines = [
        f"{number}. [{'help' if entry['from'] == 'help' else 'error' if entry['from'] == 'error' else 'text'}] {entry['text']}"
        for number, entry in enumerate(drawn, 1)
    ]
    (args.folder / "paragraphs.txt").write_text("\n\n".join(lines) + "\n")
    (args.folder / "key.json").write_text(json.dumps(drawn, indent=1) + "\n")
    print(f"{len(drawn)} texts: {args.folder / 'paragraphs.txt'}")


if __name__ == "__main__":
    main()
