"""What mkdocs is told beside mkdocs.yml: the pages that lie outside docs/. README.md is the site's home."""

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parent.parent
PAGES = {"README.md": "index.md", "CONTRIBUTING.md": "CONTRIBUTING.md", "CHANGELOG.md": "CHANGELOG.md"}


def on_files(files: Files, config: Any) -> Files:
    for source, page in PAGES.items():
        text = (ROOT / source).read_text(encoding="utf-8")
        files.append(File.generated(config, page, content=re.sub(r"\]\(docs/", "](", text)))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    return re.sub(r"\]\(\.\./([A-Z]+\.md)", lambda link: f"]({PAGES[link[1]]}", markdown)
