"""A run that stops and goes on has the bits of one that does not. tests/campaigns/stop_matrix.py stops after every step, in every pair of features."""

import pytest
from stop_matrix import Case, covering_cases, outcome

ALL_AT_ONCE = (
    "bfloat16",
    "3",
    "both",
    "file",
    "selective",
    "one stage",
    "ring",
    "0.1",
    "ramp-up",
    "blend",
    "asynchronous",
)


@pytest.mark.sweep
def test_a_stop_changes_no_bit():
    outcome(Case(ALL_AT_ONCE), [3])


@pytest.mark.full
def test_the_cases_cover_every_pair_but_one_that_is_refused():
    assert len(covering_cases()) < 40
    assert covering_cases.refused == [("0", "both")]
