"""docs/walkthrough.md: its lines are those of the code, and its groups are those of Megatron's own example."""

import re

import pytest
from walkthrough_doc import PAGE, ROW, definitions, place_of, places

REDRAW = "run: python tests/campaigns/walkthrough_doc.py"


@pytest.mark.full
def test_every_line_of_the_page_is_current():
    """Not before every commit, for every edit of a file moves lines."""
    assert places(PAGE.read_text()) == PAGE.read_text(), REDRAW


def test_every_definition_of_the_page_is_in_the_file_that_it_names():
    page = PAGE.read_text()
    tables = [line for line in page.splitlines() if re.match(r"\| .* \|$", line) and "| Here |" not in line]
    assert len(ROW.findall(page)) == len(tables) > 40, "a row of the page names no line"
    apart = re.compile(r"(?<=\.py):\d+")
    assert apart.sub("", places(page)) == apart.sub("", page), REDRAW


def test_a_line_that_has_moved_is_found():
    """And a definition that is gone."""
    page = PAGE.read_text()
    assert places(re.sub(r"(\w+\.py):\d+", r"\1:7", page)) == places(page) != re.sub(r"(\w+\.py):\d+", r"\1:7", page)
    assert (
        place_of("megatron.core.parallel.rank_grid.Grid.groups")
        == f"megatron/core/parallel/rank_grid.py:{definitions('megatron/core/parallel/rank_grid.py')['Grid.groups']}"
    )
    with pytest.raises(AttributeError):
        places(page.replace("grid.Grid.groups", "grid.Grid.gruppen"))


def test_the_groups_are_those_of_the_example_in_megatron():
    """16 ranks, tensor-parallel size 2, pipeline size 4: the docstring of mpu.initialize_model_parallel, v2.5, lists them."""
    page = PAGE.read_text()
    for line in (
        "8 data_parallel groups: [g0, g2], [g1, g3], [g4, g6], [g5, g7], [g8, g10], [g9, g11], [g12, g14], [g13, g15]",
        "8 tensor model-parallel groups: [g0, g1], [g2, g3], [g4, g5], [g6, g7], [g8, g9], [g10, g11], [g12, g13], [g14, g15]",
        "4 pipeline model-parallel groups: [g0, g4, g8, g12], [g1, g5, g9, g13], [g2, g6, g10, g14], [g3, g7, g11, g15]",
    ):
        assert f"\n{line}\n" in page
