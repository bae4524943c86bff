"""Each promise of extension: a folder beside this file holds a fork's files, which are copied away and trained over megatron as it is.

    tests/promises/NAME/pretrain.py     a script as a user writes it: at its end it calls `pretrain`
    tests/promises/NAME/flags           two lines: the flags of every run; those of TP 2 x PP 2 alone. May be missing
    tests/promises/NAME/*.py            what the script imports

Here `pretrain` trains 3 steps in float64, with ranks as threads: as one process, and at TP 2 x PP 2, whose calls end late. Losses,
norms and weights of the two are equal, and the memory of a step is the predicted one. A new promise is a new folder, nothing else;
what it puts in a table of megatron is taken out again. A promise must take less than 1.5 seconds.
"""

import shutil
from functools import partial
from pathlib import Path
from shlex import split
from types import SimpleNamespace

import pytest
from local_ranks import run_ranks
from script_run import leaving_nothing_of, settings_of, trainer_of
from tiny_run import Outcome, assert_equal, pieces_of_chunks, put_together

from megatron.core.parallel.mesh import Mesh
from tools.script import script_at

HERE = Path(__file__).parent
PROMISES = sorted(path.parent.name for path in HERE.glob("*/pretrain.py"))
SIZES = (
    "--num-layers 4 --hidden-size 16 --num-attention-heads 4 --seq-length 8 --vocab-size 60 --make-vocab-size-divisible-by 8 --fp64 "
    "--micro-batch-size 2 --global-batch-size 8 --train-iters 3 --lr 1e-2 --clip-grad 0.5 --eval-iters 0 --num-workers 0 --device cpu "
    "--log-memory-interval 3 "
)
SPREAD = "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 "


@pytest.fixture
def fork(request, tmp_path, monkeypatch) -> SimpleNamespace:
    """What the script of a promise's folder, copied away, gives `pretrain`, by name; and `flags`, the two lines of its file."""
    folder = tmp_path / request.param
    shutil.copytree(HERE / request.param, folder, ignore=shutil.ignore_patterns("__pycache__"))
    flags = (folder / "flags").read_text().splitlines() if (folder / "flags").exists() else ["", ""]
    with leaving_nothing_of(folder):
        monkeypatch.syspath_prepend(folder)
        yield SimpleNamespace(**script_at(str(folder / "pretrain.py"), split(SIZES + flags[0]))._asdict(), flags=flags)


def train_rank(mesh: Mesh, fork: SimpleNamespace, flags: str) -> SimpleNamespace:
    """This rank's whole run: losses and norm of each step, its pieces of the weights, and what the last step took."""
    rank = SimpleNamespace(losses=[], norms=[])
    with trainer_of(fork, mesh, SIZES + flags) as trainer:

        def report(result, batch_size: int) -> None:
            rank.losses.append(sum(result.losses.values()))
            rank.norms.append(result.grad_norm)

        trainer._report = report
        trainer._train()
        rank.weights = pieces_of_chunks(trainer.chunks, mesh, lambda p: p.data, {})
        rank.memory = memory_of(trainer)
    return rank


def memory_of(trainer) -> dict[str, tuple[int, int]]:
    """kind -> (predicted, measured) bytes of the step that was counted; nothing where nothing is predicted.

    Without communication, since the double of the ranks copies what travels.
    """
    watch = trainer.memory
    measured = watch._measured() if watch.predicted else {}
    return {kind: (watch._predicted(kind), size) for kind, size in measured.items() if kind != "communication"}


def run(fork: SimpleNamespace, sizes: dict[str, int], flags: str) -> tuple[Outcome, list[dict[str, tuple[int, int]]]]:
    """What must not depend on the layout, and the memory of each rank."""
    stages = settings_of(fork, SIZES + flags)[0].stages
    ranks = run_ranks(sizes, partial(train_rank, fork=fork, flags=flags), delayed=bool(sizes), stages=stages)
    losses = max((rank.losses for rank in ranks), key=sum)  # the other stages know none
    whole = Outcome(losses, ranks[0].norms, [], put_together([rank.weights for rank in ranks]))
    return whole, [rank.memory for rank in ranks]


FAST = ("layer", "v_schedule")  # the others are left to the whole set


@pytest.mark.full
@pytest.mark.parametrize(
    "fork", [pytest.param(name, marks=[pytest.mark.full] * (name not in FAST)) for name in PROMISES], indirect=True
)
def test_a_fork_trains_at_tp_2_and_pp_2_as_in_one_process(fork: SimpleNamespace):
    everywhere, spread = fork.flags
    expected, memory = run(fork, {}, everywhere)
    got, memory_of_ranks = run(fork, {"tp": 2, "pp": 2}, f"{SPREAD} {everywhere} {spread}")
    assert len(expected.losses) == 3 and all(expected.losses) and expected.losses[0] != expected.losses[-1]
    assert_equal(got, expected, 1e-10)
    for rank in [*memory, *memory_of_ranks]:
        assert {"parameters", "gradients", "optimizer", "activations"} <= rank.keys(), "nothing is predicted"
        for kind, (predicted, measured) in rank.items():
            assert predicted == pytest.approx(measured, rel=0.05), kind
