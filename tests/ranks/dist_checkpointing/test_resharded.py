"""A few pairs of tests/campaigns/reshard_campaign.py, which has all; and what its independent reader refuses."""

from pathlib import Path

import pytest
import reshard_campaign
import torch
from independent_reader import differing, latest, read
from small_checkpoints import save_one

PAIRS = [
    ("bf16", "one process, reuse", "bf16", "DP 4, ZeRO 3"),
    ("fp32", "CP 2, heads, DP 2, ZeRO 3", "fp32", "CP 4, gathered, ZeRO 1"),
    ("fp32", "TP 2 with SP", "bf16", "DP 2, ZeRO 1, reuse"),
]


@pytest.mark.full
@pytest.mark.parametrize(
    "pair", [PAIRS[0], *(pytest.param(pair, marks=pytest.mark.full) for pair in PAIRS[1:])], ids=str
)
def test_what_one_layout_saves_another_loads_to_the_bit(pair: tuple[str, str, str, str], tmp_path: Path):
    (result,) = reshard_campaign.results_of([pair], tmp_path)
    assert result["tensors"] > 100


def test_the_plan_has_every_ordered_pair_of_fifteen_layouts():
    cases = list(reshard_campaign.plan(1))
    within = [case for case in cases if case[0] == case[2]]
    assert len(reshard_campaign.LAYOUTS) == 15 and len(set(within)) == 4 * 225
    assert {(before, after) for before, _, after, _ in cases if before != after} == set(reshard_campaign.CROSSED)
    assert max(layout.ranks for layout, _ in reshard_campaign.LAYOUTS.values()) == 4


def test_a_wrong_bit_would_be_found(tmp_path: Path):
    """In a tensor, in what aligns it and in the manifest by the reader; in one of two checkpoints by the comparison."""
    x = {"w": torch.arange(5.0), "v": torch.ones(3, dtype=torch.bfloat16)}
    save_one(tmp_path / "a", 1, **x)
    save_one(tmp_path / "b", 1, **{"w": -x["w"], "v": x["v"]})
    one, other = (read(latest(tmp_path / name)).tensors for name in "ab")
    assert differing(one, other) == ["w"] and one["v"].values.tolist() == [1.0] * 3
    for path in sorted(latest(tmp_path / "a").iterdir()):
        content = path.read_bytes()
        for at in range(0, len(content), 7):
            path.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
            with pytest.raises((AssertionError, ValueError)):
                read(latest(tmp_path / "a"))
        path.write_bytes(content)
