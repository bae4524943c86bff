"""Names that are data (in checkpoints, caches, logs, on command lines, as seeds) are those of tests/campaigns/frozen_names.json."""

import json
from collections.abc import Callable
from pathlib import Path

import frozen_names
import pytest

SAVED = json.loads(Path(frozen_names.__file__).with_suffix(".json").read_text())
SLOW = (frozen_names.hashes,)  # builds index caches


def check(now: dict[str, frozen_names.Part]) -> None:
    report = frozen_names.report(frozen_names.differences(SAVED, now))
    assert not report, f"names that are data have changed\n{report}"


@pytest.mark.parametrize(
    "part", [pytest.param(part, marks=[pytest.mark.full] * (part in SLOW)) for part in frozen_names.QUICK]
)
def test_names_in_tables_and_models_are_frozen(part: Callable[[], frozen_names.Part]):
    check(frozen_names.collected([part]))


@pytest.mark.full
def test_names_in_what_runs_write_and_read_are_frozen():
    check(frozen_names.whole())


def test_every_part_is_saved_and_none_is_empty():
    parts = [frozen_names.name_of(part) for part in (*frozen_names.QUICK, *frozen_names.WHOLE)]
    assert list(SAVED) == parts and all(SAVED[part] for part in parts)


def test_a_difference_is_told_by_its_group_with_what_to_do():
    before = {"tables": {"table: X": ["a", "b"], "table: gone": ["c"]}, "not collected": {"group": ["d"]}}
    now = {"tables": {"table: X": ["a", "e"], "table: new": ["f"]}}
    found = frozen_names.differences(before, now)
    assert found == {
        "lost": {"table: X": ["b"], "table: gone": ["c"]},
        "added": {"table: X": ["e"], "table: new": ["f"]},
    }
    lines = frozen_names.report(found).splitlines()
    assert lines[:4] == ["table: X: lost b", "table: gone: lost c", "table: X: added e", "table: new: added f"]
    assert "checkpoints no longer resume" in lines[4] and "python tests/campaigns/frozen_names.py >" in lines[5]
    only_added = frozen_names.report({"lost": {}, "added": {"group": ["a"]}})
    assert "resume" not in only_added and "frozen_names.json" in only_added
    assert frozen_names.report(frozen_names.differences(now, now)) == ""
