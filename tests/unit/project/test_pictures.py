"""The pictures of the documents: each is shown, those that code alone makes are current, and all are small."""

import re

import pytest
from documents import ROOT
from pictures_doc import DOCS, DRAWN, PICTURES

REDRAW = "run: python tests/campaigns/pictures_doc.py"
SHOWN = re.compile(r"!\[([^\]]+)\]\(([^)]+)\)")


@pytest.mark.parametrize("name", DRAWN)
def test_a_drawing_is_that_of_the_code(name: str):
    assert (DOCS / name).read_text() == DRAWN[name](), REDRAW


def test_every_picture_is_shown_by_its_pages_with_words_that_say_what_it_shows():
    shown: dict[str, set[str]] = {}
    for page in DOCS.glob("*.md"):
        for words, name in SHOWN.findall(page.read_text()):
            assert len(words.split()) > 4, (page.name, words)
            shown.setdefault(name, set()).add(page.name)
    assert shown == {name: set(pages) for name, pages in PICTURES.items()}
    files = {path.name for kind in ("png", "svg") for path in ROOT.rglob(f"docs/*.{kind}")}
    assert files == set(PICTURES)
    assert all((DOCS / name).stat().st_size < 256 * 1024 for name in PICTURES)
