"""Ctrl-C in the middle of a step, of a checkpoint, of building an index: what is left is whole, and a run goes on from it.

Whole runs of one rank, within this process. tests/processes/test_interrupt.py signals jobs of several.
"""

import contextlib
import io
import re
import shlex
import signal
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import whole_run
from said import tells

import pretrain_gpt
from megatron.core.datasets import IndexedDatasetWriter, index_cache
from megatron.core.dist_checkpointing import write_and_publish as write_pieces_and_manifest
from megatron.core.optimizer.flat_optimizer import FlatOptimizer

TINY = (
    "--num-layers 1 --hidden-size 8 --num-attention-heads 1 --seq-length 8 --tokenizer-type NullTokenizer --vocab-size 31 "
    "--micro-batch-size 1 --lr 0.1 --log-interval 1 --eval-iters 0 --device cpu --train-iters 6 "
)
LINE = re.compile(r"iteration +(\d+)/.*?(lm loss: \S+)")


@pytest.fixture
def foreground():
    """As at a terminal: a process that a shell started in the background ignores the signal, and so would these runs."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler, "it is left as it was found"
    signal.signal(signal.SIGINT, before)


def run(flags: str, forward_step=pretrain_gpt.forward_step) -> None:
    whole_run.run(shlex.split(TINY + flags), tiny=[], forward_step=forward_step)


def press_at(monkeypatch, place: object, name: str, count: int) -> None:
    """Have Ctrl-C come as `place.name` is called for the `count`-th time."""
    function, calls = getattr(place, name), []

    def pressed(*args, **more):
        calls.append(name)
        if len(calls) == count:
            signal.raise_signal(signal.SIGINT)
        return function(*args, **more)

    monkeypatch.setattr(place, name, pressed)


@cache
def uninterrupted() -> dict[str, str]:
    """The loss of each step."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        run("--mock-data")
    return dict(LINE.findall(out.getvalue()))


@pytest.mark.full
@pytest.mark.parametrize("name", ["_write_own_items", "publish", None])
def test_a_run_interrupted_in_a_step_or_a_save_goes_on_from_the_checkpoint_before(
    name, foreground, tmp_path, monkeypatch, capsys
):
    flags = f"--mock-data --save {tmp_path} --save-interval 2 --load {tmp_path}"
    with monkeypatch.context() as patch:
        places = {
            "_write_own_items": write_pieces_and_manifest,
            "publish": write_pieces_and_manifest.publish_by_rename_and_cleanup,
        }
        place, name = (FlatOptimizer, "clip_factor") if name is None else (places[name], name)
        first = {"clip_factor": 4}.get(name, 2)  # of the second save, or of its step
        press_at(patch, place, name, first)
        with pytest.raises(SystemExit) as stop:
            run(flags)
    said = capsys.readouterr()
    iteration = 3 if name == "clip_factor" else 4
    assert stop.value.code == 130
    assert tells(said.err, f"{iteration} 2 --load {tmp_path}")
    run(flags)
    whole = capsys.readouterr().out
    assert [path.name for path in sorted(tmp_path.glob("iter_*"))] == [f"iter_{i:07d}" for i in (2, 4, 6)]
    assert "going on from iteration 2" in whole
    again = dict(LINE.findall(said.out)) | dict(LINE.findall(whole))
    assert again == uninterrupted() and len(again) == 6


@pytest.mark.parametrize(
    "place, name", [(np, "save"), pytest.param(index_cache, "_hash_of_blocks", marks=pytest.mark.full)]
)
def test_an_index_that_was_interrupted_is_built_again(place, name, foreground, tmp_path, monkeypatch, capsys):
    with IndexedDatasetWriter(tmp_path / "text", np.uint16) as writer:
        for i in range(100):
            writer.add_document([i % 31] * 40)
    flags = f"--data-path {tmp_path}/text --data-cache-path {tmp_path}/cache --split 1,0,0"
    with monkeypatch.context() as patch:
        press_at(patch, place, name, 2)
        with pytest.raises(SystemExit) as stop:
            run(flags)
    assert stop.value.code == 130
    assert tells(capsys.readouterr().err, "--save")
    assert not list(Path(tmp_path / "cache").glob("*.tmp")) + list(Path(tmp_path / "cache").glob("*description.txt"))
    run(flags)
    assert "building the index of" in capsys.readouterr().out
