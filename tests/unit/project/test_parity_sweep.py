"""The sweep goes on where it stopped, keeps its order, and says what differs."""

import json
from collections import Counter
from itertools import islice
from pathlib import Path

import parity_sweep
import pytest
from case_runs import read_results
from layout_space import Case, count_cases, covering_cases, main_product
from parity_sweep import main, ordered_cases


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> list[Case]:
    """Six cases, of which the third differs and the fifth raises."""
    cases = list(covering_cases(2)[:6])

    def worst_difference(case: Case, **_: str) -> tuple[float, str]:
        if case == cases[4]:
            raise RuntimeError("rank 1 failed")
        return (1e-3, "weight w") if case == cases[2] else (1e-14, "losses of step 0")

    monkeypatch.setattr(parity_sweep, "ordered_cases", lambda max_ranks: cases)
    monkeypatch.setattr(parity_sweep, "main_product", lambda: tuple(cases[4:]))
    monkeypatch.setattr(parity_sweep, "covering_cases", lambda strength: tuple(cases[: 2 * strength]))
    monkeypatch.setattr(parity_sweep, "worst_difference", worst_difference)
    return cases


def test_a_stopped_sweep_goes_on_and_fails_if_any_case_differs(small: list[Case], tmp_path: Path, capsys):
    path = tmp_path / "results.jsonl"
    assert main([str(path), "--limit-minutes", "0"]) == 0
    assert main([str(path), "--shard", "1/3"]) == 0  # cases 0 and 3
    assert list(read_results(path)) == [str(small[0]), str(small[3])]
    whole = path.read_text()
    path.write_text(whole + whole.splitlines()[0][:40])  # a stop cut a line short
    assert main([str(path)]) == 1
    assert sorted(read_results(path)) == sorted(map(str, small))
    assert capsys.readouterr().out.endswith(f"6 of {count_cases():,} cases have been run, 2 differ\n")
    before = path.read_text()
    assert main([str(path)]) == 1, "nothing left to run, and two still differ"
    assert path.read_text() == before
    assert json.loads(before.splitlines()[-1])["where"] == "losses of step 0"


def test_the_report_says_how_many_of_how_many(small: list[Case], tmp_path: Path):
    path, table = tmp_path / "results.jsonl", tmp_path / "parity.md"
    main([str(path)])
    assert main([str(path), "--report", str(table)]) == 1
    text = table.read_text()
    assert f"**6 of {count_cases():,} cases have been run; 2 differ.**" in text
    assert f"DIFFERS: `{small[2]}`: weight w, 0.001" in text
    assert f"DIFFERS: `{small[4]}`: RuntimeError: rank 1 failed" in text
    assert "worst relative difference: 1.0e-14 (allowed 1e-10), losses of step 0" in text


def test_a_report_writes_its_sections_and_keeps_the_others(small: list[Case], tmp_path: Path):
    path, compiled, page = (tmp_path / name for name in ("results.jsonl", "compiled.jsonl", "parity.md"))
    main([str(path), "--only", str(small[0])])
    main([str(compiled), "--compile", "layers"])
    page.write_text("# Old\n\nold words\n\n## By hand\n\nkept words\n")
    assert main([str(path), "--report", str(page)]) == 0
    assert main([str(compiled), "--compile", "layers", "--report", str(page)]) == 1
    first, by_hand, of_compiled = page.read_text().split("## ")
    assert f"**1 of {count_cases():,} cases have been run; 0 differ.**" in first and "old words" not in first
    assert by_hand == "By hand\n\nkept words\n\n"
    assert of_compiled.startswith("With `--compile layers`\n") and "cases have been run; 2 differ.**" in of_compiled
    before = page.read_text()
    for command in ([str(path)], [str(compiled), "--compile", "layers"]):
        main([*command, "--report", str(page)])
        assert page.read_text() == before


@pytest.mark.full
def test_a_smaller_limit_keeps_the_order():
    few = list(ordered_cases(1))
    assert len(few) == len(set(few)) == count_cases(1)
    begin = [case for case in islice(ordered_cases(64), 5_000) if case.ranks == 1]
    assert begin == few[: len(begin)] and len(begin) > 20


def test_the_main_product_has_every_combination_once():
    cases = main_product()
    layouts = {(c.tp, c.sp, c.pp, c.v, c.dp, c.schedule, c.microbatches) for c in cases}
    # By hand: 5 choices of tp and sp, 3 of dp; 3 schedules without chunks x microbatches; then on several ranks also interleaved
    # and zb-interleaved x v x microbatches, and zb-v.
    alone, several = 3 * 2, 3 * 3 + 3 * 2 + 2 * 2 + 3
    assert len(layouts) == 5 * 3 * (alone + 2 * several)
    assert len(cases) == len(set(cases)) == len(layouts) * 3 * 2 * 2 * 2
    dealt = Counter(c.corner for c in cases)
    assert min(dealt.values()) > 0.8 * len(cases) / len(dealt)
