"""`get_args()` holds the position of the run while it trains, as NVIDIA's training.py writes it into its args: what forks read.

iteration: that of the start. curr_iteration: the step under way, counted from 0. consumed_train_samples: before the step, with those of
--iterations-to-skip, which skipped_train_samples counts. consumed_valid_samples: of all validations and tests so far. do_train, do_valid,
do_test, train_iters.
"""

from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import pytest
from local_ranks import run_ranks
from script_run import trainer_of

import pretrain_gpt
from megatron.training import get_args

MODEL = (
    "--num-layers 2 --hidden-size 16 --num-attention-heads 2 --seq-length 8 --max-position-embeddings 8 --micro-batch-size 1 "
    "--lr 1e-3 --mock-data --tokenizer-type NullTokenizer --vocab-size 20 --device cpu --log-interval 1"
)


class Position(NamedTuple):
    iteration: int
    curr_iteration: int
    consumed_train_samples: int
    skipped_train_samples: int
    consumed_valid_samples: int


def positions(mesh, flags: str) -> tuple[list[Position], list[Position], tuple]:
    """What a script sees in each step, in each validation and test, and after the run."""
    seen = {True: [], False: []}

    def now() -> Position:
        return Position(*(getattr(get_args(), name) for name in Position._fields))

    def forward_step(data, model):
        of_kind = seen[model.training]
        if not of_kind or of_kind[-1] != now():
            of_kind.append(now())
        return pretrain_gpt.forward_step(data, model)

    def datasets(sizes):
        args = get_args()
        assert (args.iteration, args.consumed_train_samples) == (trainers_start[0], trainers_start[1])
        return pretrain_gpt.train_valid_test_datasets_provider(sizes)

    datasets.is_distributed = True
    trainers_start = (4, 16) if "--load" in flags else (0, 0)
    script = SimpleNamespace(
        **vars(pretrain_gpt) | {"forward_step": forward_step, "train_valid_test_datasets_provider": datasets}
    )
    with trainer_of(script, mesh, f"{MODEL} {flags}", predicts=False) as trainer:
        trainer.run()
        args = get_args()
        return seen[True], seen[False], (args.train_iters, args.do_train, args.do_valid, args.do_test, now())


@pytest.mark.parametrize("sizes", [{}, {"dp": 2}, {"pp": 2}], ids=["one rank", "dp 2", "pp 2"])
def test_args_follow_the_run_and_its_resume(sizes: dict[str, int], tmp_path: Path):
    layout = (
        f"--pipeline-model-parallel-size {sizes.get('pp', 1)} --global-batch-size 4 --eval-interval 2 --eval-iters 3"
    )
    layout += f" --iterations-to-skip 2 --save {tmp_path}"
    first = f"{layout} --train-iters 4"
    again = f"{layout} --train-iters 6 --load {tmp_path} --override-opt_param-scheduler"
    for rank in run_ranks(sizes, partial(positions, flags=first)):
        # the validation of iteration 2 comes after it was left out; those of the end are validation and test
        assert rank[0] == [Position(0, 0, 0, 0, 0), Position(0, 2, 8, 4, 12), Position(0, 3, 12, 4, 12)]
        assert rank[1] == [Position(0, 0, 8, 4, 0), Position(0, 3, 16, 4, 12), Position(0, 3, 16, 4, 24)]
        assert rank[2] == (4, True, True, True, Position(0, 3, 16, 4, 36))
    for rank in run_ranks(sizes, partial(positions, flags=again)):
        assert rank[0] == [Position(4, 4, 16, 4, 24), Position(4, 5, 20, 4, 24)]
        assert rank[2][:4] == (6, True, True, True)


def test_args_have_the_iterations_of_train_samples_and_growing_batches():
    """2 samples a step for 4 samples, then 4: Megatron writes the number of steps into `args.train_iters`."""
    flags = "--train-samples 12 --global-batch-size 4 --rampup-batch-size 2 2 4 --eval-iters 0"
    ((steps, evaluations, end),) = run_ranks({}, partial(positions, flags=flags))
    assert [(one.curr_iteration, one.consumed_train_samples) for one in steps] == [(0, 0), (1, 2), (2, 4), (3, 8)]
    assert evaluations == [] and end == (4, True, False, False, Position(0, 3, 12, 0, 0))
