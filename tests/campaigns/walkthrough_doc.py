"""Writes the line numbers and the outputs of docs/walkthrough.md again.

    python tests/campaigns/walkthrough_doc.py            writes them
    python tests/campaigns/walkthrough_doc.py --check    lists the lines that are wrong

A row of the page's tables names a definition by its import path, and ends with its file and line. A text block is the output of the
command in the bash block before it.
"""

import ast
import contextlib
import importlib
import io
import re
import shlex
import subprocess
import sys
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
sys.path.insert(1, str(ROOT / "examples"))
sys.path.insert(2, str(ROOT / "tests" / "support"))
sys.path.insert(3, str(ROOT / "tests" / "campaigns"))
PAGE = ROOT / "docs" / "walkthrough.md"
ROW = re.compile(r"^(\|.*`)([\w/]+\.py:\d+)(` \|)$", re.MULTILINE)
NAME = re.compile(r"`((?:megatron|pretrain_gpt)[\w.]+)`")
SHOWN = re.compile(r"^```bash\n([^\n]*)\n```\n\n```text\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def places(page: str) -> str:
    """The page with each row's file and line as they are."""
    return ROW.sub(lambda row: row[1] + place_of(NAME.findall(row[1])[0]) + row[3], page)


def place_of(name: str) -> str:
    """Where a class, function or method is defined, by its import path: megatron/core/parallel/rank_grid.py:27"""
    words = name.split(".")
    for count in range(len(words) - 1, 0, -1):
        with contextlib.suppress(ModuleNotFoundError):
            found = importlib.import_module(".".join(words[:count]))
            break
    for word in words[count:]:
        found = getattr(found, word)
    file = Path(sys.modules[found.__module__].__file__).relative_to(ROOT)
    return f"{file}:{definitions(file)[found.__qualname__]}"


@cache
def definitions(file: Path) -> dict[str, int]:
    """The line of each class, function and method of a file, by its qualified name."""
    found: dict[str, int] = {}

    def enter(node: ast.AST, above: str) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.ClassDef | ast.FunctionDef):
                found[above + child.name] = child.lineno
                enter(child, f"{above}{child.name}.")

    enter(ast.parse((ROOT / file).read_text()), "")
    return found


def outputs(page: str) -> str:
    """The page with what its commands print now."""
    return SHOWN.sub(lambda block: block[0].replace(f"```text\n{block[2]}", f"```text\n{output_of(block[1])}"), page)


def output_of(command: str) -> str:
    """In this process; a torchrun command as processes."""
    import walkthrough

    first, *words = shlex.split(command)
    if first == "torchrun":
        torchrun = [sys.executable, "-m", "torch.distributed.run"]
        done = subprocess.run([*torchrun, *words], cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True)
        return trimmed(done.stdout)
    with contextlib.redirect_stdout(io.StringIO()) as said:
        walkthrough.main(words[1:])
    return trimmed(said.getvalue())


def trimmed(text: str) -> str:
    """Without blanks at the ends of lines."""
    return "\n".join(line.rstrip() for line in text.rstrip().splitlines()) + "\n"


if __name__ == "__main__":
    page = PAGE.read_text()
    if sys.argv[1:] == ["--check"]:
        wrong = [line for line, now in zip(page.splitlines(), places(page).splitlines()) if line != now]
        sys.exit("\n".join([*wrong, "run: python tests/campaigns/walkthrough_doc.py"]) if wrong else 0)
    PAGE.write_text(outputs(places(page)))
