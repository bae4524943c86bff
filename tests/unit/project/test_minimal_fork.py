"""The schedule of examples/minimal_fork, on paper. tests/processes/test_examples.py trains with it."""

import sys
from pathlib import Path

import pytest

from megatron.core.base.dataclass_flags import ConfigError
from megatron.core.pipeline_parallel.schedule.gpipe_1f1b_zb_h1 import one_f_one_b
from megatron.core.pipeline_parallel.schedule.lower import add_reduce, add_transfers, check_rendezvous
from megatron.core.pipeline_parallel.schedule.plot import plot_text
from megatron.core.pipeline_parallel.schedule.registry import SCHEDULES
from megatron.core.pipeline_parallel.schedule.simulate import peak_live
from megatron.training.arguments.command_line import parse_args
from megatron.training.arguments.validation import check

FORK = Path(__file__).parents[3] / "examples" / "minimal_fork"


@pytest.fixture(scope="module")
def rounds():
    sys.path.insert(0, str(FORK))
    try:
        import schedule
    finally:
        sys.path.remove(str(FORK))
        sys.modules.pop("schedule", None)
    return schedule.rounds


@pytest.mark.parametrize(("p", "m"), [(1, 1), (2, 4), (3, 7), (4, 2)])
def test_rounds_do_the_work_of_1f1b_and_never_deadlock(rounds, p, m):
    made = rounds(p, m, 1)
    assert [sorted(map(str, row)) for row in made] == [sorted(map(str, row)) for row in one_f_one_b(p, m)]
    check_rendezvous(add_reduce(add_transfers(made)))
    assert max(peak_live(made)) <= p


def test_the_drawing_is_what_runs(rounds):
    drawn = [line.strip() for line in rounds.__doc__.splitlines() if line.strip().startswith("rank ")]
    assert drawn == plot_text(rounds(2, 4, 1)).splitlines()


def test_rounds_have_one_chunk(rounds):
    with pytest.raises(ValueError, match=r"rounds.*2"):
        rounds(2, 4, 2)


def test_a_schedule_that_lacks_a_backward_is_found_before_the_run(monkeypatch):
    monkeypatch.setitem(SCHEDULES, "short", lambda p, m, v: [row[:-1] for row in SCHEDULES["1f1b"](p, m, v)])
    line = (
        "--mock-data --tokenizer-type NullTokenizer --vocab-size 1000 --micro-batch-size 2 --global-batch-size 8 "
        "--train-iters 10 --seq-length 32 --lr 1e-3 --num-layers 4 --pipeline-schedule short "
        "--pipeline-model-parallel-size 2"
    )
    with pytest.raises(ConfigError) as error:
        check(parse_args(line.split())[0], 2)
    assert "short" in str(error.value) and "B0.3" in str(error.value) and "B1.3" in str(error.value)
