"""ZeRO over gloo, where collectives are real: bits between stages, and torch's own fully sharded data parallelism as the oracle."""

from pathlib import Path

import pytest
from processes import run

SCRIPT = str(Path(__file__).with_name("zero_ranks.py"))


@pytest.mark.full
@pytest.mark.parametrize(("what", "ranks"), [("bits+fsdp2", 2), ("bits", 4)])
def test_stages_agree(what: str, ranks: int):
    """bits: the four stages with one another, in layouts, precisions, microbatches, recompute and overlap; fsdp2: stage 3 with torch's
    fully_shard, to rounding."""
    outcome = run([SCRIPT, what], ranks).succeeded()
    assert all(f"{what} agree" in text for text in outcome.stdout)
