"""examples/minimal_fork over context-parallel ranks: its own layer, second loss and data, with the numbers of one process."""

from collections.abc import Iterator
from functools import partial

import pytest
from documents import ROOT
from local_ranks import run_ranks
from script_run import leaving_nothing_of, trainer_of

from megatron.core.parallel.mesh import Mesh
from megatron.training.training import Script
from tools.script import script_at

FORK = ROOT / "examples" / "minimal_fork"
FLAGS = (
    "--branch-scale 0.7 --phrase-length 4 --vocab-size 50 --seq-length 16 --num-layers 2 --hidden-size 32 --num-attention-heads 4 "
    "--micro-batch-size 2 --global-batch-size 8 --train-iters 4 --lr 1e-2 --eval-iters 0 --device cpu --fp64 --num-workers 0 "
)
LAYOUTS = {
    "--context-parallel-size 2": {"cp": 2},
    "--context-parallel-size 4 --cp-comm-type all_gather": {"cp": 4},
    "--context-parallel-size 2 --cp-comm-type a2a": {"cp": 2, "cp_heads": 2},
    "--context-parallel-size 2 --tensor-model-parallel-size 2 --sequence-parallel": {"tp": 2, "cp": 2},
    "--context-parallel-size 2 --pipeline-model-parallel-size 2 --pipeline-schedule rounds": {"cp": 2, "pp": 2},
    "--context-parallel-size 2 --zero-stage 2": {"cp": 2, "dp": 2},
}


@pytest.fixture(scope="module")
def fork() -> Iterator[Script]:
    with leaving_nothing_of(FORK):
        yield script_at(str(FORK / "pretrain.py"))


def losses_of(mesh: Mesh, script: Script, flags: str) -> list[tuple[float, ...]]:
    """Both losses of each step of a run, and dropout with them."""
    steps = []
    with trainer_of(script, mesh, FLAGS + flags, predicts=False) as trainer:
        trainer.log.add = lambda losses, is_nan=False, *, skipped=False: steps.append(tuple(losses.values()))
        trainer._train()
    return steps


@pytest.fixture(scope="module")
def alone(fork: Script) -> list[tuple[float, ...]]:
    return run_ranks({}, partial(losses_of, script=fork, flags=""))[-1]


@pytest.mark.full
@pytest.mark.parametrize("flags", LAYOUTS)
def test_context_parallel_ranks_give_the_losses_of_one_process(
    flags: str, fork: Script, alone: list[tuple[float, ...]]
):
    sizes = {"cp_heads": 1} | LAYOUTS[flags] if "a2a" not in flags else LAYOUTS[flags]
    many = run_ranks(sizes, partial(losses_of, script=fork, flags=flags))[-1]
    assert len(many) == len(alone) == 4 and len(alone[0]) == 2
    for step, wanted in zip(many, alone):
        assert step == pytest.approx(wanted, rel=1e-10)
