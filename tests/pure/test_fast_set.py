"""The table of tests of whose cases the fast set has some: each name in it is a test's."""

from pathlib import Path

from fast_set import ONE_IN


def test_the_thinned_tests_are_there():
    for name, every in ONE_IN.items():
        file, _, function = name.partition("::")
        assert f"def {function}(" in (Path(__file__).parent.parent / file).read_text(), name
        assert every > 1
