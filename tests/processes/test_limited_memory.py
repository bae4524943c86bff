"""A model whose state is larger than its process' memory trains with files. Processes, because a limit is a process' own."""

import math
from pathlib import Path
from shlex import split

import pytest
from processes import PRETRAIN_GPT, Outcome, run

from megatron.training.memory.forecast_memory_along_schedule import forecast
from megatron.training.memory.zero_state_bytes_by_tier import Element, predicted_bytes_by_tier
from tools.estimating.job import read

LIMITED = str(Path(__file__).with_name("limited.py"))
LAYERS, WIDTH, LIMIT = 9, 512, 450_000_000
FLAGS = split(
    f"--num-layers {LAYERS} --hidden-size {WIDTH} --num-attention-heads 4 --seq-length 8 --micro-batch-size 1 --train-iters 2 --lr 1e-3 "
    "--device cpu --mock-data --tokenizer-type NullTokenizer --vocab-size 60 --eval-iters 0 --log-interval 1 --bf16 --zero-stage 3"
)


def state_bytes() -> int:
    """Of the layers alone: 12 h^2 weights each, in bfloat16, with float32 gradients, masters and two moments."""
    weights = LAYERS * 12 * WIDTH**2
    return sum(
        sum(kinds.values()) for kinds in predicted_bytes_by_tier(weights, Element.of(2, moments=2), stage=3).values()
    )


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


@pytest.mark.full
@pytest.mark.parametrize(("length", "words"), [(8192, 16384), (32768, 8192)])
def test_a_step_on_a_long_sample_takes_half_of_the_memory_with_tiles_offload_and_recompute(tmp_path, length, words):
    """A limit of half of what is predicted without them, which the run without them does not keep. One head, float32."""
    model = split(
        f"--num-layers 1 --hidden-size 64 --num-attention-heads 1 --position-embedding-type rope --seq-length {length} --micro-batch-size 1 "
        f"--vocab-size {words - 1} --hidden-dropout 0 --attention-dropout 0"
    )
    less = split(
        "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1 --cpu-offloading-num-layers 1 "
        "--optimizer-offload-fraction 0 --tiled-mlp 64 --tiled-loss 64"
    )
    step = split(
        "--train-iters 1 --lr 1e-3 --eval-iters 0 --log-interval 1 --mock-data --tokenizer-type NullTokenizer --device cpu --no-check-memory"
    )
    limit = sum(forecast(read(model).job)[0].bytes.values()) // 2
    assert limit > 2**29
    made = run([LIMITED, str(limit), *model, *step, *less, "--offload-dir", str(tmp_path)], timeout=600).succeeded()
    assert len(made.training) == 1 and -0.1 < made.training[0].loss - math.log(words) < 0.2
    plain = run([LIMITED, str(limit), *model, *step], timeout=600)
    assert plain.codes == (1,) and plain.training == [] and "out of memory" in plain.stderr[0], plain
