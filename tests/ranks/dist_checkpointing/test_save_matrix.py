"""Saves and loads over optimizers, ZeRO stages and places of their state, with ranks that own nothing: cases of tests/campaigns/save_matrix.py."""

import pytest
from save_matrix import OPTIMIZER, SaveCase, covering_cases, crossed_cases, owning, worst_difference


@pytest.mark.parametrize("case", crossed_cases(), ids=str)
def test_what_is_saved_is_resumed_to_the_bit_and_resharded(case: SaveCase):
    assert worst_difference(case, steps=1)[0] < 1e-10


@pytest.mark.sweep
@pytest.mark.parametrize("case", covering_cases(2), ids=str)
def test_every_pair_of_choices_is_saved_and_resumed(case: SaveCase):
    assert worst_difference(case)[0] < 1e-10


def test_the_cases_of_the_command_cross_optimizers_and_stages_and_have_ranks_that_own_nothing():
    cases = crossed_cases()
    stages = {optimizer: {case.stage for case in cases if case.optimizer == optimizer} for optimizer in OPTIMIZER}
    assert stages == {name: {*"01"} if "muon" in name else {*"0123"} for name in OPTIMIZER}
    # Some rank has no momentum of a matrix in any of them, and in some a rank owns no element of anything.
    owned = {str(case): owning(case) for case in cases if case.needs_whole and case.stage == "1"}
    assert owned and all(any(not kinds["momentum_buffer"] for kinds in ranks) for ranks in owned.values())
    empty = {name for name, ranks in owned.items() if any(not any(kinds.values()) for kinds in ranks)}
    assert {case.copy for case in cases if str(case) in empty} == {"local", "global"}
    # Masters that only some ranks have, in a copy of which each rank reads its own part.
    assert any(case.copy == "local" and case.precision in ("bf16", "fp16") for case in cases if str(case) in empty)
