"""Whether only words have changed since a revision: docstrings, comments, and the text of strings.

    python tests/support/same_code.py REVISION [FOLDER ...]        megatron and tools when no folder is named

The syntax trees of both must be equal once docstrings are left out, every string is blank, and of an f-string only the expressions inside its
braces are left, in their order. Prints the first place in each file where they differ, and ends with 1 if there is one.
"""

import ast
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


class _Blank(ast.NodeTransformer):
    """Takes the words out of a tree."""

    def visit_Expr(self, node: ast.Expr) -> ast.AST | None:
        is_text = isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        return None if is_text else self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> ast.AST:
        return ast.Constant("") if isinstance(node.value, str) else node

    def visit_JoinedStr(self, node: ast.JoinedStr) -> ast.AST:
        values = [self.generic_visit(part) for part in node.values if isinstance(part, ast.FormattedValue)]
        return ast.JoinedStr(values) if values else ast.Constant("")


def blanked(text: str) -> list[str]:
    """The tree of a file without its words, a line a node."""
    return ast.dump(_Blank().visit(ast.parse(text)), indent=1).splitlines()


def main(arguments: list[str]) -> int:
    revision, folders = arguments[0], arguments[1:] or ["megatron", "tools"]
    git = ["git", "-C", str(ROOT)]
    listed = subprocess.run([*git, "ls-files", *folders], capture_output=True, text=True, check=True).stdout.split()
    differ = 0
    for name in (name for name in listed if name.endswith(".py")):
        before = subprocess.run([*git, "show", f"{revision}:{name}"], capture_output=True, text=True, check=False)
        if before.returncode:
            print(f"{name}: not there before")
            differ += 1
            continue
        old, new = blanked(before.stdout), blanked((ROOT / name).read_text())
        if old != new:
            differ += 1
            at = next((i for i, (a, b) in enumerate(zip(old, new)) if a != b), min(len(old), len(new)))
            print(f"{name}: {' '.join(old[at : at + 1])} / {' '.join(new[at : at + 1])}")
    print(f"{differ} files differ in more than words from {revision}")
    return 1 if differ else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
