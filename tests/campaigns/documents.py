"""The documents and the commands in them."""

import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
DOCUMENTS = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")),
    *sorted((ROOT / "docs").glob("*.md")),
]


def name_of(document: Path) -> str:
    return str(document.relative_to(ROOT))


def blocks_of(document: Path, *languages: str) -> list[str]:
    """The texts of fenced blocks in these languages."""
    fence = rf"^```(?:{'|'.join(languages)})\n(.*?)^```"
    return re.findall(fence, document.read_text(), re.MULTILINE | re.DOTALL)


def names_of_block(page: str, text: str) -> dict[str, Any]:
    """What the one Python block of docs/`page` that contains the text defines, by name."""
    (block,) = (block for block in blocks_of(ROOT / "docs" / page, "python") if text in block)
    names: dict[str, Any] = {"__name__": "block_of_page"}
    exec(block, names)
    return names


def commands_of(document: Path) -> list[str]:
    """The commands in fenced bash blocks, each on one line, without comments."""
    blocks = blocks_of(document, "bash", "sh", "shell", "console")
    lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    return [command for line in lines if (command := " ".join(re.sub(r"(^|\s)#.*", "", line).split()))]


def write_part(document: Path, name: str, text: str) -> None:
    """Put `text` between the marks `<!-- NAME: begin -->` and `<!-- NAME: end -->` of a document."""
    begin, end = (f"<!-- {name}: {mark} -->" for mark in ("begin", "end"))
    before, rest = document.read_text().split(begin)
    document.write_text(f"{before}{begin}\n\n{text}\n\n{end}{rest.split(end)[1]}")
