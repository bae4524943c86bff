"""Whole runs under context parallelism, from the command line: validation alone, and checkpoints of other numbers of ranks."""

from functools import partial
from pathlib import Path

import pytest
from local_ranks import run_ranks
from script_run import trainer_of

import pretrain_gpt
from megatron.core.parallel.mesh import Mesh

TINY = (
    "--num-layers 2 --hidden-size 16 --num-attention-heads 4 --seq-length 32 --mock-data --tokenizer-type NullTokenizer "
    "--vocab-size 31 --global-batch-size 4 --micro-batch-size 2 --lr 1e-2 --eval-iters 2 --eval-interval 100 --fp64 "
    "--device cpu --num-workers 0 --reset-attention-mask --hidden-dropout 0 --attention-dropout 0 "
)


def losses_of(mesh: Mesh, flags: str) -> list[float]:
    """Of this rank's validation and test at the end."""
    seen: list[float] = []
    cp = f"--context-parallel-size {mesh['cp'].size} "
    with trainer_of(pretrain_gpt, mesh, f"{TINY}{cp}{flags}", predicts=False) as trainer:
        trainer.watch.report_validation = lambda name, losses, *, at_end: seen.append(losses["lm loss"])
        trainer.run()
    assert len(seen) == 2
    return seen


@pytest.mark.full
@pytest.mark.parametrize("kind", ["p2p", "a2a"])
def test_a_checkpoint_of_four_ranks_is_validated_by_one_and_by_two_and_goes_back(kind: str, tmp_path: Path):
    """float64: the same losses to 1e-10, with --skip-train and after one more step each."""
    saved, more = f"--save {tmp_path / 'four'}", f"--cp-comm-type {kind} --train-iters"
    begun = run_ranks({"cp": 4}, partial(losses_of, flags=f"{more} 2 {saved}"))[-1]
    for ranks in (1, 2, 4):
        only = partial(losses_of, flags=f"{more} 2 --load {tmp_path / 'four'} --skip-train")
        assert run_ranks({"cp": ranks}, only)[-1] == pytest.approx(begun, rel=1e-10)
    longer = f"{more} 3 --override-opt_param-scheduler --load"
    alone = run_ranks({"cp": 1}, partial(losses_of, flags=f"{longer} {tmp_path / 'four'} --save {tmp_path / 'one'}"))[
        -1
    ]
    assert alone != pytest.approx(begun, rel=1e-6)
    again = f"{more} 3 --load {tmp_path / 'one'} --skip-train"
    for flags in (f"{longer} {tmp_path / 'four'}", again):
        assert run_ranks({"cp": 4}, partial(losses_of, flags=flags))[-1] == pytest.approx(alone, rel=1e-10)
