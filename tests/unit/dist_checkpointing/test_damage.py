"""A little of each damage of tests/campaigns/fuzz_data.py, chosen and reduced by hypothesis; the command tries thousands."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import fuzz_data

hypothesis = pytest.importorskip("hypothesis")

EXAMPLES = {
    "damaged_index": 15,
    "index_of_other_data": 5,
    "damaged_tokens": 5,
    "damaged_cache": 2,
    "damaged_found_cache": 2,
}


def answers(kind: str, count: int) -> list[str]:
    """What `count` inputs of a kind are answered with; raises for the simplest one that is answered wrongly."""
    found = []

    @hypothesis.settings(max_examples=count, deadline=None, database=None, derandomize=True)
    @hypothesis.given(hypothesis.strategies.randoms(use_true_random=False))
    def check(rng):
        found.append(fuzz_data.answer(kind, rng))

    check()
    return found


@pytest.mark.full
@pytest.mark.parametrize("kind", EXAMPLES)
def test_damaged_files_are_refused_or_right(kind):
    assert set(answers(kind, EXAMPLES[kind])) <= {fuzz_data.REFUSED, fuzz_data.RIGHT}


@pytest.mark.full
@pytest.mark.parametrize("kind", EXAMPLES)
def test_more_damaged_files_are_refused_or_right(kind):
    assert len(answers(kind, 8 * EXAMPLES[kind])) >= 8 * EXAMPLES[kind]


@pytest.mark.full
@pytest.mark.parametrize("kind", fuzz_data.INTERRUPTIONS)
def test_interrupted_commands_go_on(kind, monkeypatch):
    """In processes of their own, because they are killed; torch's threads are not running in this one, which is forked."""
    monkeypatch.setattr(fuzz_data.sources, "_CHUNK_BYTES", 1 << 10)
    for number in range(2):
        assert fuzz_data.answer(kind, fuzz_data.random.Random(number)) == fuzz_data.RIGHT


def test_a_wrong_token_would_be_found(tmp_path):
    fuzz_data.write(tmp_path / "a", [[[1, 2], [3]]])
    assert fuzz_data.tokens_are(tmp_path / "a", [[1, 2], [3]]) == fuzz_data.RIGHT
    with pytest.raises(AssertionError):
        fuzz_data.tokens_are(tmp_path / "a", [[1, 2], [4]])
    assert fuzz_data.in_child(lambda: 3) == 3
    assert fuzz_data.in_child(lambda: fuzz_data.time.sleep(9) or 0, kill_after=0.01) == -9
