"""Work that takes long says so while it runs, and short work says nothing."""

import json
import threading

import pytest
from said import tells

from megatron.training.monitor import long_task_progress as heartbeat_module
from megatron.training.monitor.long_task_progress import heartbeat
from tools import train_tokenizer


def test_a_long_block_says_every_time_how_far_it_is_and_a_short_one_nothing():
    said, twice = [], threading.Event()

    def say(line: str) -> None:
        said.append(line)
        if len(said) == 2:
            twice.set()

    with heartbeat("building the model", say, so_far=lambda: "half", every=0.005):
        assert twice.wait(10)
    with heartbeat("nothing", said.append, every=10):
        pass
    assert all(line.startswith("   building the model: ") and line.endswith("half") for line in said)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("heartbeat")]


def test_an_error_ends_the_beat_and_comes_through():
    with pytest.raises(KeyError), heartbeat("work", print, every=10):
        raise KeyError("x")
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("heartbeat")]


def test_training_a_tokenizer_says_how_far_it_is(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(heartbeat_module.heartbeat.__wrapped__, "__kwdefaults__", {"so_far": None, "every": 0.001})
    words = " ".join(f"{i * 7919 % 10007:x}" for i in range(20_000))
    (tmp_path / "text.jsonl").write_text(json.dumps({"text": words}) + "\n")
    arguments = ["--input", str(tmp_path / "text.jsonl"), "--vocab-size", "600", "--output", str(tmp_path / "t.json")]
    assert train_tokenizer.main(arguments) == 0
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("   training the tokenizer: ")]
    assert lines and tells(lines[-1], "0 MB")
