"""docs/flags.md says what the parser does."""

import re
from pathlib import Path

from flags_doc import document

from megatron.training.arguments.command_line import make_parser

PAGE = Path(__file__).parents[3] / "docs" / "flags.md"


def test_the_page_is_current():
    assert PAGE.read_text() == document(), "run: python tests/campaigns/flags_doc.py"


def test_the_page_names_every_flag_of_the_parser():
    named = set(re.findall(r"`(--[\w-]+)", PAGE.read_text()))
    assert set(make_parser().known_flags()) - {"-h", "--help"} <= named
