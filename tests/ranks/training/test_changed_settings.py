"""Runs that go on from a checkpoint with other settings: what is refused, what is said. Which they are: tests/unit/training/test_config_diff.py."""

import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from said import tells
from whole_run import TINY, run

from megatron.core.datasets.indexed_dataset_writer import IndexedDatasetWriter
from megatron.core.dist_checkpointing import manifest_format

COURSE = {
    "hidden_dropout": (0.1, 0.2),
    "attention_dropout": (0.1, 0.3),
    "label_smoothing": (0.0, 0.1),
    "adam_beta1": (0.9, 0.8),
    "adam_beta2": (0.999, 0.99),
    "adam_eps": (1e-08, 1e-06),
    "clip_grad": (1.0, 0.5),
    "reset_position_ids": (False, True),
    "reset_attention_mask": (False, True),
    "eod_mask_loss": (False, True),
    "seed": (1234, 5),
    "z_loss_coeff": (0.0, 0.001),
    "min_loss_scale": (1.0, 2.0),
    "num_workers": None,
    "micro_batch_size": None,
    "recompute_granularity": None,
}


@pytest.mark.full
def test_every_setting_that_changes_the_course_of_a_resumed_run_is_said(said, checkpoints):
    flags = " ".join(
        f"--{name.replace('_', '-')}" + ("" if change[1] is True else f" {change[1]}")
        for name, change in COURSE.items()
        if change is not None
    )
    text = said(
        f"--train-iters 5 --override-opt_param-scheduler --load {checkpoints} --num-workers 0 --micro-batch-size 2 --global-batch-size 2 "
        f"--recompute-activations {flags}"
    )
    told = dict(re.findall(r"resumed with another (\w+): (.*)", text))
    expected = {name: f"{change[0]} before, {change[1]} now" for name, change in COURSE.items() if change is not None}
    assert told == expected | {"train_iters": "4 before, 5 now", "global_batch_size": "1 before, 2 now"}
    rate = re.search(r"the learning rate follows this run's settings.*", text)
    assert rate is not None and tells(rate[0], "decay 4 5")


@pytest.mark.full
def test_the_weights_alone_are_taken_by_another_course_without_a_line(said, checkpoints):
    text = said(f"--train-iters 1 --finetune --load {checkpoints} --clip-grad 0.5 --lr 3 --bf16 --seed 3")
    assert "loaded weights" in text and "another" not in text.split("loaded weights")[1]


OTHER_MODELS = {
    "activation": ("--swiglu --ffn-hidden-size 32", "swiglu False True"),
    "norm": ("--normalization RMSNorm", "normalization LayerNorm RMSNorm"),
    "positions": ("--position-embedding-type rope", "position_embedding_type learned_absolute rope"),
    "shape": ("--qk-layernorm --num-attention-heads 2", "qk_layernorm num_attention_heads kv_channels"),
    "tokenizer": ("--vocab-size 31 --null-tokenizer-eod-id 3", "null_tokenizer_eod_id 3 --allow-tokenizer-change"),
    "precision": ("--bf16", "fp32 bf16 --allow-precision-change"),
    "precision, float64": ("--fp64", "fp32 fp64 --allow-precision-change"),
    "precision, residual": ("--fp16 --fp32-residual-connection", "fp16 fp32"),
}


@pytest.mark.full
@pytest.mark.parametrize(
    "what", [pytest.param(name, marks=[pytest.mark.full] * (", " in name)) for name in OTHER_MODELS]
)
def test_a_checkpoint_of_another_model_tokenizer_or_precision_is_refused(what: str, checkpoints, refused, said):
    flags, named = OTHER_MODELS[what]
    load = f"--train-iters 5 --override-opt_param-scheduler --load {checkpoints} {flags}"
    message = refused(load)
    assert tells(message, named)
    if what.startswith("precision"):  # not of weights alone
        then, now = re.search(r"was trained in (.*), this run is in (.*?);", message).groups()
        assert tells(said(f"{load} --allow-precision-change"), f"{then} {now}")
        assert "loaded weights" in said(f"{load} --finetune")
    else:
        assert tells(refused(f"{load} --finetune"), named)
        assert tells(refused(load.replace("--load", "--pretrained-checkpoint")), named)
    if what == "tokenizer":
        assert tells(said(f"{load} --allow-tokenizer-change"), "null_tokenizer_eod_id")


def edited(source: Path, copy: Path, edit) -> Path:
    """A copy of the checkpoints in which `edit` has changed the state of the last."""
    shutil.copytree(source, copy)
    path = copy / "iter_0000004" / "manifest.json"
    manifest = manifest_format.parse_manifest(path.read_text(), path)
    edit(manifest.state)
    path.write_text(manifest_format.to_json(manifest))
    return copy


def test_an_older_checkpoint_is_loaded_and_what_it_lacks_is_said(checkpoints, said, tmp_path):
    def age(state: dict) -> None:
        for name in ("model", "tokenizer_sha256", "data_sha256"):
            del state[name]
        del state["config"]["own"], state["config"]["own_model"], state["config"]["transformer"]["z_loss_coeff"]

    older = edited(checkpoints, tmp_path / "older", age)
    text = said(f"--train-iters 4 --load {older}")
    assert "the checkpoint does not name its model" in text and "loaded checkpoint of iteration 4" in text
    assert "resumed with another" not in text and "dropout masks" not in text


def test_other_masks_of_dropout_are_said(checkpoints, said, tmp_path):
    older = edited(checkpoints, tmp_path / "older", lambda state: state.pop("dropout_masks"))
    assert "resumed with other dropout masks: drawn by version 1 before, 2 now" in said(
        f"--train-iters 4 --load {older}"
    )
    assert "dropout masks" not in said(f"--train-iters 4 --load {checkpoints}")
    assert "dropout masks" not in said(f"--train-iters 4 --load {older} --hidden-dropout 0 --attention-dropout 0")


def test_a_setting_of_the_model_that_this_code_does_not_know_is_refused(checkpoints, refused, said, tmp_path):
    def squared(state: dict) -> None:
        state["config"]["transformer"]["squared_relu"] = True

    newer = edited(checkpoints, tmp_path / "newer", squared)
    assert tells(refused(f"--train-iters 5 --load {newer}"), "squared_relu")
    course = edited(checkpoints, tmp_path / "course", lambda state: state["config"]["training"].update(curriculum=3))
    assert tells(said(f"--train-iters 4 --load {course}"), "curriculum 3")


FORGED = {
    "train": None,
    "log": "x",
    "optimizer_steps": "one",
    "config": 7,
    "config/optimizer": 7,
    "config/own": [1],
    "config/transformer/hidden_size": "wide",
    "train/iteration": 3,
    "train/consumed_train_samples": -5,
    "train/schedules": 1,
    "train/schedules/learning_rate": [],
    "log/steps": None,
    "log/sums": 1,
    "grad_scaler": [],
    "train/requested_train_samples": 1 << 99,
    "config/checkpoint": None,
}


@pytest.mark.full
def test_a_state_that_no_run_has_written_is_refused_by_name(checkpoints, refused, tmp_path):
    for number, (where, value) in enumerate(FORGED.items()):

        def forge(state: dict, where=where, value=value) -> None:
            *parents, last = where.split("/")
            for name in parents:
                state = state[name]
            state[last] = value

        message = refused(f"--train-iters 5 --load {edited(checkpoints, tmp_path / str(number), forge)}")
        assert f"--load {tmp_path / str(number)}" in message and (where in message or where == "config")


def write_data(prefix: Path, shift: int) -> None:
    """Equal lengths, so that only what the tokens are tells two files apart."""
    prefix.parent.mkdir(exist_ok=True)
    with IndexedDatasetWriter(prefix, np.uint16) as writer:
        for number in range(40):
            writer.add_document([(number * number + shift) % 31] * 9)


@pytest.mark.full
def test_other_data_are_told_by_what_the_files_hold(capsys, tmp_path):
    def told(path: Path, more: str) -> list[str]:
        run(
            f"--train-iters 2 --split 1,0,0 --data-path {path} {more}",
            tiny=[word for word in TINY if word != "--mock-data"],
        )
        return [line for line in capsys.readouterr().out.splitlines() if line.startswith("resumed with")]

    first, moved, load = tmp_path / "a" / "books", tmp_path / "b" / "tales", f"--load {tmp_path}/saved"
    write_data(first, 0)
    assert told(first, f"--save {tmp_path}/saved") == told(first, load) == []
    moved.parent.mkdir()
    for ending in (".bin", ".idx"):
        shutil.copy(f"{first}{ending}", f"{moved}{ending}")
    assert told(moved, load) == [], "other paths, the same data"
    write_data(moved, 1)
    assert told(moved, load) == [f"resumed with other data: data_path {first} before, {moved} now"]
    shutil.rmtree(first.parent)
    write_data(first, 1)
    assert told(first, load) == [f"resumed with other data: the files have changed since ({first})"]


def rates_in(text: str) -> list[float]:
    return [float(rate) for rate in re.findall(r"learning rate: ([\d.E+-]+)", text)]


OWN_RATES = (
    "--train-iters 8 --lr 0.3 --lr-decay-style cosine"  # of a run that goes on from the checkpoint of iteration 2
)


@pytest.mark.full
def test_a_run_without_its_optimizer_state_takes_the_schedule_of_the_checkpoint_where_it_asks_for_it(checkpoints, said):
    words = f"{OWN_RATES} --load {checkpoints} --ckpt-step 2 --no-load-optim"
    text = said(f"{words} --use-checkpoint-opt_param-scheduler")
    # lr 0.1 falls in a line to 0 over 4 iterations: after the third 1/4 of it is left, and then nothing.
    assert rates_in(text) == [0.025, 0, 0, 0, 0, 0] and "follows this run's settings" not in text
    text = said(words)
    assert rates_in(text)[0] > 0.1 and "the learning rate follows this run's settings" in text


@pytest.mark.full
def test_schedules_of_a_checkpoint_are_not_asked_for_where_weights_alone_are_taken(
    checkpoints, refused, said, tmp_path
):
    flag = "--use-checkpoint-opt_param-scheduler"
    message = refused(f"{OWN_RATES} --load {checkpoints} --finetune {flag}")
    assert tells(message, f"{flag} --finetune")
    for others in (f"--load {tmp_path} --save {tmp_path}", f"--load {tmp_path} --pretrained-checkpoint {checkpoints}"):
        text = said(f"{OWN_RATES} {others} {flag}")
        (note,) = (line for line in text.splitlines() if line.startswith(flag))
        assert "no checkpoint is resumed" in note and rates_in(text)[0] > 0.1
        for path in tmp_path.iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    assert flag not in said(f"{OWN_RATES} --load {checkpoints} {flag}").split("loaded")[1]
    note = said(f"{OWN_RATES} {flag}").split("no effect here: ")[1].splitlines()[0]
    assert tells(note, f"{flag} --load")
