"""Memory of a small run, measured beside its prediction."""

import pytest

from megatron.training.memory.forecast_memory_along_schedule import IN_MEMORY, KINDS, RankMemory

SMALL = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --micro-batch-size 2 --vocab-size 500 "
    "--make-vocab-size-divisible-by 8 "
)


def check(predicted: RankMemory, measured: dict[str, int], total: int, in_file: int) -> None:
    expected = predicted.within(*IN_MEMORY)
    for kind in KINDS[:3]:
        assert expected[kind] == measured[kind], kind
    assert expected["activations"] == pytest.approx(measured["activations"], rel=0.05)
    assert expected["communication"] == pytest.approx(measured["communication"], rel=0.03)
    # The peaks of the kinds need not meet; what is said of all of them is never too little.
    assert sum(expected.values()) >= 0.99 * total
    assert predicted.tiers.get("file", 0) == in_file
