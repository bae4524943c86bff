"""docs/architecture.md against the code: its pictures are current, and every place that it names exists."""

import re

import pytest
from architecture_doc import PAGE, ROOT, levels, picture, way

REDRAW = "run: python tests/campaigns/architecture_doc.py"


def test_the_levels_are_current():
    assert picture(PAGE.read_text(), "levels") == levels(), REDRAW


@pytest.mark.full
def test_the_way_of_a_batch_is_current():
    assert picture(PAGE.read_text(), "way") == way(), REDRAW


def test_what_answers_a_question_exists():
    """Each file and function of the page's tables; every question has a place in the code."""
    text = PAGE.read_text()
    questions = text.split("## Where is it answered?")[1].split("\n## ")[0]
    rows = [row for row in questions.splitlines() if row.startswith("| ") and "? | " in row]
    assert len(rows) >= 50 and all(re.search(r"`\w+/[\w/]+\.py: [\w.]+` \|$", row) for row in rows)
    named = re.findall(r"`((?:convert|core|training)/[\w/]+\.py)(?:: (?:\w+\.)?(\w+))?`", text)
    assert len(named) > 120
    for file, name in named:
        source = (ROOT / "megatron" / file).read_text()
        assert re.search(rf"^ *(?:def |class )?{name}\b", source, re.MULTILINE), f"{file} has no {name}"
