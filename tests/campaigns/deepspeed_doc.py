"""Writes the tables of docs/deepspeed.md from megatron/deepspeed/config_keys.py.

python tests/campaigns/deepspeed_doc.py
"""

import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
sys.path.insert(1, str(ROOT / "tests" / "support"))
sys.path.insert(2, str(ROOT / "tests" / "campaigns"))

from megatron.deepspeed.settings import KEYS  # noqa: E402

PAGE = ROOT / "docs" / "deepspeed.md"
MARK = "<!-- written by tests/campaigns/deepspeed_doc.py -->\n"


def tables() -> str:
    """A table of the keys that work, and one line a reason of the others."""
    found: dict[str, dict[str, list[str]]] = {"works": {}, "no effect": {}, "refused": {}}
    for key, answer in KEYS.answers.items():
        unless = f" (unless {', '.join(map(json.dumps, answer.harmless))})" if answer.harmless else ""
        found[answer.status].setdefault(answer.text, []).append(f"`{key}`{unless}")
    lines = ["| Key that works | Meaning |", "|---|---|"]
    lines += [f"| {', '.join(keys)} | {text} |" for text, keys in found["works"].items()]
    for status, title in (
        ("no effect", "Keys without effect, and why"),
        ("refused", "Keys that are refused, and what to do"),
    ):
        lines += ["", f"**{title}**", ""]
        lines += [f"- {', '.join(keys)}: {text}" for text, keys in found[status].items()]
    return "\n".join(lines) + "\n"


def document(page: str) -> str:
    """The page with the tables as they are now."""
    before, _, after = page.split(MARK)
    return f"{before}{MARK}\n{tables()}\n{MARK}{after}"


if __name__ == "__main__":
    PAGE.write_text(document(PAGE.read_text()))
