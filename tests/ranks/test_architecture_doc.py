"""docs/architecture.md against the code: its pictures are current."""

import re

from architecture_doc import PAGE, floors, picture, way

REDRAW = "run: python tests/architecture_doc.py"


def test_the_floors_are_current():
    """But for their code lines, which change with every commit."""
    drawn, now = (
        re.findall(r"^\d|\[[^ \]]+", text, re.MULTILINE)
        for text in (picture(PAGE.read_text(), "floors"), floors(False))
    )
    assert drawn == now, REDRAW


def test_the_way_of_a_batch_is_current():
    assert picture(PAGE.read_text(), "way") == way(), REDRAW
