"""A model whose state is larger than its process' memory trains with files. Processes, because a limit is a process' own."""

from pathlib import Path
from shlex import split

import pytest
from processes import PRETRAIN_GPT, Outcome, run

from megatron.training.memory.tier_bytes import Element, bytes_by_tier

LIMITED = str(Path(__file__).with_name("limited.py"))
LAYERS, WIDTH, LIMIT = 9, 512, 450_000_000
FLAGS = split(
    f"--num-layers {LAYERS} --hidden-size {WIDTH} --num-attention-heads 4 --seq-length 8 --micro-batch-size 1 --train-iters 2 --lr 1e-3 "
    "--device cpu --mock-data --tokenizer-type NullTokenizer --vocab-size 60 --eval-iters 0 --log-interval 1 --bf16 --zero-stage 3"
)


def state_bytes() -> int:
    """Of the layers alone: 12 h^2 weights each, in bfloat16, with float32 gradients, masters and two moments."""
    weights = LAYERS * 12 * WIDTH**2
    return sum(sum(kinds.values()) for kinds in bytes_by_tier(weights, Element.of(2, moments=2), stage=3).values())


def limited(*flags: str) -> Outcome:
    return run([LIMITED, str(LIMIT), *FLAGS, *flags])


@pytest.mark.full
def test_a_model_larger_than_memory_trains_with_files_and_not_without(tmp_path):
    """To the same losses and norms, digit for digit, as in memory without a limit; within the limit that run is refused, and, where it
    is to start all the same, ends with advice."""
    assert state_bytes() == 18 * LAYERS * 12 * WIDTH**2 > LIMIT
    away = limited("--offload-dir", str(tmp_path), "--offload-params").succeeded()
    assert len(away.training) == 2 and away.training[1].loss != away.training[0].loss
    assert away.printed == run([PRETRAIN_GPT, *FLAGS]).succeeded().printed
    assert list(tmp_path.iterdir()) == []
    in_memory = limited()
    assert in_memory.codes == (2,) and in_memory.training == []
    assert "(ulimit -d)" in in_memory.stderr[0] and "--offload-dir" in in_memory.stderr[0]
    in_memory = limited("--no-check-memory")
    assert in_memory.codes == (1,) and in_memory.training == [] and "Traceback" not in in_memory.everything
    assert "out of memory" in in_memory.stderr[0] and "--offload-dir" in in_memory.stderr[0]
