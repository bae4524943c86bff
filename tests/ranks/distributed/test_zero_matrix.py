"""The cases of `tests/campaigns/zero_matrix.py` in which every triple of choices occurs, against one process; its command runs the rest."""

import json
from itertools import combinations
from math import prod
from pathlib import Path

import pytest
import zero_matrix
from parity_cases import TOLERANCE
from tiny_run import assert_equal
from zero_matrix import DIMENSIONS, ZeroCase, all_cases, covering_cases, main, outcomes

CASES = [pytest.param(case, id=str(case), marks=[pytest.mark.full]) for case in covering_cases(3)]


@pytest.mark.parametrize("case", CASES)
def test_every_triple_of_choices_equals_one_process(case: ZeroCase):
    assert_equal(*outcomes(case, steps=2), TOLERANCE)  # the sweep takes a third


@pytest.mark.full
def test_the_cases_have_every_triple_and_names_of_their_own():
    for three in combinations(range(len(DIMENSIONS)), 3):
        sizes = [len(list(DIMENSIONS.values())[i]) for i in three]
        assert len({tuple(case.choices[i] for i in three) for case in covering_cases(3)}) == prod(sizes)
    assert len({str(case) for case in all_cases()}) == len(all_cases()) == 6 * 2 * 2 * 3 * 3 * 2 * 6


def test_the_command_goes_on_and_reports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys):
    """Two of three cases are run, then the third, which differs."""
    cases, path, page = list(all_cases()[:3]), tmp_path / "results.jsonl", tmp_path / "page.md"
    monkeypatch.setattr(zero_matrix, "ordered_cases", lambda: cases[:2])
    monkeypatch.setattr(
        zero_matrix, "worst_difference", lambda case: (1e-3 if case == cases[2] else 1e-14, "losses of step 0")
    )
    assert main([str(path)]) == 0
    monkeypatch.setattr(zero_matrix, "ordered_cases", lambda: cases)
    assert main([str(path)]) == 1
    assert [json.loads(line)["case"] for line in path.read_text().splitlines()] == [str(case) for case in cases]
    assert main([str(path), "--report", str(page)]) == 1
    assert "**3 of 2,592 cases have been run; 1 differ.**" in page.read_text()
    assert f"DIFFERS: `{cases[2]}`: losses of step 0, 0.001" in page.read_text()
    assert "3 of 3 cases have been run, 1 differ" in capsys.readouterr().out
