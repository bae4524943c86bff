"""Models with the options of published families give the numbers of one process in any layout, ranks as threads, in float64.

Here each bundle of options has one layout, the bundles other layouts; `tests/campaigns/parity_sweep.py --options` runs every bundle in all of
a set in which each pair of choices occurs.
"""

from dataclasses import replace

import pytest
from option_cases import BUNDLES, OTHER_LAYOUTS, OptionCase, option_cases, worst_difference_in, worst_difference_of
from parity_cases import TOLERANCE


def one_of_each() -> list[OptionCase]:
    """The bundles in layouts of two tensor-parallel ranks or more."""
    chosen: dict[str, OptionCase] = {}
    cases = [case for case in option_cases() if case.case.tp > 1 and case.case.ranks <= 8 and case.case.m < 4]
    for number, case in enumerate(cases):
        if list(BUNDLES)[number // len(BUNDLES) % len(BUNDLES)] == case.bundle:
            chosen.setdefault(case.bundle, case)
    return list(chosen.values())


FAST = ("oss",)


@pytest.mark.full
@pytest.mark.parametrize(
    "case", [pytest.param(c, marks=() if c.bundle in FAST else pytest.mark.full) for c in one_of_each()], ids=str
)
def test_options_give_the_numbers_of_one_process(case: OptionCase):
    worst, where = worst_difference_of(case)
    assert worst <= TOLERANCE, f"{where} differs by {worst}"


@pytest.mark.full
@pytest.mark.parametrize("bundle", ["olmo3", "cohere2"])
def test_norms_of_a_head_that_ranks_share(bundle: str):
    """Neighbours hold copies of a key head's weights, and of its share of a mean."""
    layout = {"tp": 4, "sp": True, "pp": 1, "v": 1, "dp": 1, "schedule": "1f1b", "microbatches": "equal"}
    models = {"corner": "one group", "style": "llama", "recompute": "none", "dropout": 0.0}
    worst, where = worst_difference_of(OptionCase(bundle, replace(next(option_cases()).case, **layout, **models)))
    assert worst <= TOLERANCE, f"{where} differs by {worst}"


@pytest.mark.sweep
@pytest.mark.parametrize("layout", OTHER_LAYOUTS)
@pytest.mark.parametrize("bundle", BUNDLES)
def test_options_with_zero_and_context_parallelism(bundle: str, layout: str):
    worst, where = worst_difference_in(OTHER_LAYOUTS[layout], bundle)
    assert worst <= TOLERANCE, f"{where} differs by {worst}"
