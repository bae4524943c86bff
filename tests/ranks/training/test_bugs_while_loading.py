"""A bug of ours while a checkpoint is loaded says nothing of the user's file, and a file that says nonsense is refused by name."""

import json
from pathlib import Path

import pytest
from local_ranks import run_ranks
from said import tells
from spoiled_folders import sealed
from tiny_run import TINY_GPT2, Layout, TinyTrainer
from whole_run import run

from megatron.core.optimizer.flat_optimizer import FlatOptimizer
from megatron.training import trainer
from megatron.training.checkpointing import save_and_load_run_state
from megatron.training.monitor.training_log import TrainingLog
from megatron.training.result_checks.check_runner import Guard

BUGS = [
    IndexError("list index out of range"),
    KeyError("weight"),
    TypeError("none"),
    AttributeError("x"),
    OverflowError("y"),
]


def broken(error: Exception):
    def fail(*_, **__):
        raise error

    return fail


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("saved")

    def work(mesh) -> None:
        tiny = TinyTrainer(mesh, TINY_GPT2, Layout(), global_batch=1)
        tiny.step(0)
        tiny.save(root, 1)

    run_ranks({}, work)
    return root


@pytest.mark.full
@pytest.mark.parametrize(
    "place", ["sharded_model_state", "sharded_optimizer_state", "read_tensors", "model_name", "provenance_of_run"]
)
@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: type(bug).__name__)
def test_a_bug_while_a_checkpoint_is_loaded_is_raised_as_it_is(place: str, bug: Exception, saved: Path, monkeypatch):
    monkeypatch.setattr(save_and_load_run_state, place, broken(bug))

    def work(mesh) -> None:
        TinyTrainer(mesh, TINY_GPT2, Layout(), global_batch=1).load(saved)

    with pytest.raises(RuntimeError) as error:
        run_ranks({}, work)
    assert error.value.__cause__ is bug


@pytest.mark.full
@pytest.mark.parametrize(
    ("of", "name"),
    [(FlatOptimizer, "tensors"), (Guard, "__init__"), (TrainingLog, "load_state"), (trainer, "learning_rate_schedule")],
    ids=lambda x: getattr(x, "__name__", x),
)
def test_a_bug_while_a_run_starts_from_a_checkpoint_ends_it_with_that_bug(of, name: str, checkpoints, monkeypatch):
    bug = IndexError("list index out of range")
    monkeypatch.setattr(of, name, broken(bug))
    with pytest.raises(IndexError) as error:
        run(f"--train-iters 5 --load {checkpoints} --override-opt_param-scheduler")
    assert error.value is bug


NONSENSE = {
    "optimizer_steps": "4",
    "log/sums": {"lm loss": None},
    "log/steps": -1,
    "grad_scaler": {"scale": "big"},
    "train/guard": {"loss": {"seen": "many"}},
    "train/guard/loss": {"largest": []},
    "train/schedules/learning_rate/lr": [],
    "train/schedules/weight_decay/style": 3,
    "config/optimizer/adam_eps": {},
    "config/optimizer/clip_grad": "one",
    "config/transformer/hidden_size": 8.5,
    "checkpoints": ["x"],
}


@pytest.mark.full
@pytest.mark.parametrize("place", NONSENSE)
def test_nonsense_in_a_checkpoint_is_refused_with_the_name_of_the_entry(place: str, checkpoints, tmp_path, refused):
    root, folder = tmp_path / "root", checkpoints / "iter_0000004"
    (root / folder.name).mkdir(parents=True)
    for path in folder.iterdir():
        (root / folder.name / path.name).write_bytes(path.read_bytes())
    (root / "latest_checkpointed_iteration.txt").write_text("4")

    manifest = root / folder.name / "manifest.json"
    raw = json.loads(manifest.read_text())
    del raw["sha256"]
    at = raw["state"]
    *parents, last = place.split("/")
    for name in parents:
        at[name] = at.get(name) or {}
        at = at[name]
    at[last] = NONSENSE[place]
    manifest.write_bytes(sealed(raw))
    said = refused(f"--train-iters 5 --load {root} --use-checkpoint-opt_param-scheduler")
    assert tells(said, place.split("/")[-1]) and (
        "no run has written" in said or "in the checkpoint is not valid" in said
    )
