"""ZeRO over gloo, where collectives are real: bits between stages, and torch's own fully sharded data parallelism as the oracle."""

from pathlib import Path

import pytest
from processes import run

SCRIPT = str(Path(__file__).with_name("zero_ranks.py"))


@pytest.mark.full
@pytest.mark.parametrize(("what", "ranks"), [("bits+fsdp2", 2), ("bits", 4)])
def test_stages_agree(what: str, ranks: int, tmp_path: Path):
    """bits: ways to shard, to overlap, to accumulate, to recompute and to offload with one another, in layouts and precisions; fsdp2:
    stage 3 with torch's fully_shard, to rounding."""
    outcome = run([SCRIPT, what, str(tmp_path)], ranks).succeeded()
    assert all(f"{what} agree" in text for text in outcome.stdout)
    assert not list(tmp_path.iterdir())
