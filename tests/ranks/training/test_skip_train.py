"""A run of --skip-train needs no rate, no length and no data for training; its losses are those of the run that trained."""

import re
import shlex
from pathlib import Path

import numpy as np
import pytest
from token_files import write
from whole_run import run

MODEL = shlex.split(
    "--num-layers 1 --hidden-size 8 --num-attention-heads 1 --seq-length 8 --tokenizer-type NullTokenizer --vocab-size 31 "
    "--micro-batch-size 2 --eval-iters 4 --device cpu"
)


def losses(text: str) -> list[str]:
    return re.findall(r"validation loss .* on (\w+) set.*loss value: (\S+)", text)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    """A checkpoint, and the token files of training and of validation."""
    folder = tmp_path_factory.mktemp("trained")
    prefixes = []
    for seed, name in enumerate(("train", "valid")):
        counts = [[((start + np.arange(50) * (seed + 1)) % 31).tolist()] for start in range(10)]
        prefixes.append(write(folder / name, counts))
    return folder / "saved", *prefixes


def test_the_losses_are_those_of_the_run_that_trained(trained, tmp_path, capsys):
    saved, train, valid = trained
    files = f"--train-data-path {train} --valid-data-path {valid}"
    run(f"{files} --lr 0.1 --train-iters 3 --save {saved}", tiny=MODEL)
    expected = losses(capsys.readouterr().out)
    assert [name for name, _ in expected] == ["validation"]
    run(f"--skip-train --valid-data-path {valid} --load {saved}", tiny=MODEL)
    assert losses(capsys.readouterr().out) == expected

    # a batch of another size reads the same samples in as many iterations as it takes
    run(f"--skip-train --valid-data-path {valid} --load {saved} --eval-global-batch-size 4 --eval-iters 2", tiny=MODEL)
    assert losses(capsys.readouterr().out) == expected


def test_made_up_data_and_a_test_set_are_enough(trained, capsys):
    run("--skip-train --mock-data", tiny=MODEL)
    assert [name for name, _ in losses(capsys.readouterr().out)] == ["validation", "test"]
    run(f"--skip-train --test-data-path {trained[2]}", tiny=MODEL)
    assert [name for name, _ in losses(capsys.readouterr().out)] == ["test"]
    run(f"--skip-train --data-path {trained[2]} --split 0,1,0 --train-samples 8 --lr 0.1", tiny=MODEL)
    assert [name for name, _ in losses(capsys.readouterr().out)] == ["validation"]


def test_a_run_that_trains_still_needs_them(capsys):
    with pytest.raises(SystemExit):
        run("--mock-data", tiny=MODEL)
    told = capsys.readouterr().err
    assert "--lr is required" in told and "--train-iters (or --train-samples) is required" in told
