"""Counts lines of code: neither comment, docstring nor blank, in the formatter's layout, so that no layout is cheaper than another.

    python tests/campaigns/code_lines.py              of each package
    python tests/campaigns/code_lines.py --files      of each file too

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
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
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
def tree(text: str) -> ast.Module:
    """A file's text, parsed once for all that look at it; nobody changes it."""
    return ast.parse(text)


@cache
def nodes(text: str) -> list[ast.AST]:
    """Everything in a file's text."""
    return list(ast.walk(tree(text)))


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


def package_of(path: Path) -> str:
    """megatron/core/parallel/collectives.py -> megatron/core"""
    return str(path.relative_to(ROOT).parent)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--files", action="store_true", help="of each file too")
    given = parser.parse_args()
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
