"""The tables of tests of whose cases a set has some: each name in them is a test's."""

from pathlib import Path

from fast_set import COMMAND_ONE_IN, FULL_ONLY, ONE_IN, SWEEP_ONLY


def test_the_thinned_tests_are_there():
    for name in (*ONE_IN, *COMMAND_ONE_IN, *FULL_ONLY, *SWEEP_ONLY):
        file, _, function = name.partition("::")
        assert f"def {function}(" in (Path(__file__).parents[2] / file).read_text(), name
    assert min((*ONE_IN.values(), *COMMAND_ONE_IN.values())) > 1
