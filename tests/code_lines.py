"""Counts lines of code: neither comment, docstring nor blank, in the formatter's layout, so that no layout is cheaper than another.

    python tests/code_lines.py              of each package
    python tests/code_lines.py --files      of each file too
    python tests/code_lines.py --broken     the places in megatron/ and tools/ that break a rule of size

Before it is counted a file is formatted by ruff: line length 120, every mark that switches it off removed, no magic trailing commas. The tests count
the files as they are, which comes to the same as long as the formatter alone lays them out.
"""

import argparse
import ast
import io
import re
import subprocess
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MAX_FUNCTION, MAX_FILE, MAX_COLUMNS, MAX_TARGETS = 60, 400, 130, 2  # of megatron/ and tools/
MAX_FUNCTION, MAX_FILE, MAX_COLUMNS, MAX_TARGETS = 60, 360, 130, 2  # of megatron/ and tools/
_NO_CODE = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
_FORMAT = "format --isolated --line-length 120 --config format.skip-magic-trailing-comma=true --target-version py311 -"


def product_files() -> list[Path]:
    return sorted(path for folder in ("megatron", "tools") for path in (ROOT / folder).rglob("*.py"))


def formatted(text: str) -> str:
    """As ruff lays it out by itself."""
    text = re.sub(r" *# fmt[:] (on|off|skip)$", "", text, flags=re.MULTILINE)
    ruff = [str(Path(sys.executable).parent / "ruff"), *_FORMAT.split()]
    if not Path(ruff[0]).is_file():
        sys.exit("code_lines: ruff is not installed; pip install -c constraints.txt ruff")
    return subprocess.run(ruff, input=text, capture_output=True, text=True, check=True).stdout


@cache
def nodes(text: str) -> list[ast.AST]:
    """Everything in a file's text."""
    return list(ast.walk(ast.parse(text)))


@cache
def code_lines(text: str) -> frozenset[int]:
    """Numbers of the lines that hold code."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in _NO_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in nodes(text):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            lines -= set(range(node.lineno, node.end_lineno + 1))
    return frozenset(lines)


def targets_of(node: ast.AST) -> int:
    """How many names, attributes, items and starred ones a target is; of an assignment, of all its targets together.

    1 in `a = x`, `a.b = x`, `a[i] = x`; 2 in `a, b = x`, `a = b = x`; 3 in `a, (b, *c) = x`.
    """
    if isinstance(node, ast.Assign):
        return sum(targets_of(target) for target in node.targets)
    return sum(map(targets_of, node.elts)) if isinstance(node, ast.Tuple | ast.List) else 1


def broken(path: Path) -> Iterator[tuple[str, str]]:
    """(rule, place) of all in a file that is too long, too wide or assigns too much at once."""
    text, name = path.read_text(), path.relative_to(ROOT)
    lines = code_lines(text)
    if len(lines) > MAX_FILE:
        yield "file", f"{name} has {len(lines)} code lines; what is the second idea in it?"
    for node in nodes(text):
        if isinstance(node, ast.FunctionDef) and node.end_lineno - node.lineno >= MAX_FUNCTION:
            length = len(lines & set(range(node.lineno, node.end_lineno + 1)))
            if length > MAX_FUNCTION:
                yield "function", f"{name}:{node.lineno} {node.name} has {length} code lines"
        if isinstance(node, ast.Assign) and targets_of(node) > MAX_TARGETS:
            yield "assignment", f"{name}:{node.lineno} assigns to {targets_of(node)} targets at once"
    for number, line in enumerate(text.splitlines(), 1):
        if len(line) > MAX_COLUMNS:
            yield "line", f"{name}:{number} has {len(line)} columns"


def package_of(path: Path) -> str:
    """megatron/core/comm.py -> megatron/core"""
    return str(path.relative_to(ROOT).parent)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--files", action="store_true", help="of each file too")
    parser.add_argument("--broken", action="store_true", help="the places that break a rule of size, and nothing else")
    given = parser.parse_args()
    if given.broken:
        found = [one for path in product_files() for one in broken(path)]
        print("\n".join([*(place for _, place in found), str(dict(Counter(rule for rule, _ in found)))]))
        return
    files = {path: len(code_lines(formatted(path.read_text()))) for path in product_files()}
    files |= {path: len(code_lines(formatted(path.read_text()))) for path in sorted((ROOT / "tests").rglob("*.py"))}
    packages: Counter[str] = Counter()
    for path, lines in files.items():
        packages[package_of(path)] += lines
        packages[f"all of {path.relative_to(ROOT).parts[0]}"] += lines
    for name, lines in sorted(packages.items()):
        print(f"{lines:6} {name}")
    if given.files:
        for path, lines in files.items():
            print(f"{lines:6} {path.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
