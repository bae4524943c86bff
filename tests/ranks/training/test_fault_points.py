"""A save that a call fails, cuts short or dies at: the same command goes on to the same bits. tests/support/fault_points.py has every call."""

import pytest
from fault_points import in_order, outcome, points

# (kind of call, what happens) of the first run, on either rank; the fast set has the first of them.
_CHOSEN = {
    ("rename", "killed"): None,
    ("sync", "killed alone"): pytest.mark.full,
    ("write", "ENOSPC in"): None,
    ("write", "killed in"): pytest.mark.full,
    ("remove", "EIO"): pytest.mark.full,
    ("write", "short"): pytest.mark.full,
    ("read_into", "EIO"): pytest.mark.full,
}


@pytest.mark.full
@pytest.mark.parametrize(
    "kind, how", [pytest.param(*pair, marks=mark) if mark else pair for pair, mark in _CHOSEN.items()]
)
def test_a_run_goes_on_from_a_fault_in_a_save_to_the_same_bits(kind: str, how: str):
    chosen = [point for point in in_order(points(("TP 2",))) if (point.call.kind, point.how) == (kind, how)]
    outcome(chosen[0])
