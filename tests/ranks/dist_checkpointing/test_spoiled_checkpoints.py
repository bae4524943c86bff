"""A little of each spoiling of tests/campaigns/checkpoint_campaign.py; the command tries thousands."""

from pathlib import Path

import checkpoint_campaign
import pytest

COUNTS = {"flip": 12, "manifest": 24, "folder": 8}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoint_campaign.prepared(tmp_path_factory.mktemp("spoiled") / "base")


@pytest.mark.parametrize("part", COUNTS)
@pytest.mark.full
def test_what_is_spoiled_is_found_and_named_or_does_no_harm(part: str, base: Path):
    cases = list(checkpoint_campaign.results_of(base, {**dict.fromkeys(COUNTS, 0), part: COUNTS[part]}, [], seed=2))
    assert len(cases) == COUNTS[part]
    assert {case["outcome"] for case in cases} <= {"older used", "newest used", "not read", "refused", "right"}


def test_a_wrong_outcome_would_be_found(base: Path, monkeypatch):
    monkeypatch.setattr(checkpoint_campaign.Loader, "load", lambda root, saves=False: "other bits")
    with pytest.raises(checkpoint_campaign.Wrong, match="with other tensors"):
        checkpoint_campaign.outcome_of("a case", checkpoint_campaign.Loader, base, [], saves=False)
