"""A named pipe that nobody writes is waited for with a line that says so."""

import os
import threading
from pathlib import Path

import pytest

from megatron.core.base import warn_waiting_on_named_pipe
from megatron.core.datasets import data_config
from megatron.training.arguments.command_line import settings_in_file


@pytest.mark.parametrize("flag", ["--yaml-cfg", "--data-args-path", "--per-split-data-args-path"])
def test_a_pipe_that_nobody_writes_is_named(flag: str, tmp_path: Path, monkeypatch):
    lines: list[str] = []
    said = threading.Event()

    def record(text: str) -> None:
        lines.append(text)
        said.set()

    monkeypatch.setattr(warn_waiting_on_named_pipe, "SECONDS", 0.01)
    monkeypatch.setattr(warn_waiting_on_named_pipe, "print_stderr", record)
    path = tmp_path / "pipe"
    os.mkfifo(path)
    content = {
        "--yaml-cfg": "num-layers: 3",
        "--data-args-path": "a b",
        "--per-split-data-args-path": '{"train": ["a"]}',
    }

    def write_once_it_was_said() -> None:
        assert said.wait(60)
        path.write_text(content[flag])

    writer = threading.Thread(target=write_once_it_was_said)
    writer.start()
    reads = {
        "--yaml-cfg": lambda: settings_in_file(str(path))["num_layers"] == 3,
        "--data-args-path": lambda: data_config._read_words(str(path)) == ["a", "b"],
        "--per-split-data-args-path": lambda: data_config._read_split_lists(str(path))[0] == ["a"],
    }
    assert reads[flag]()
    writer.join()
    assert len(lines) == 1 and f"{flag} {path} is a named pipe: waiting" in lines[0]


def test_a_file_and_a_pipe_that_is_written_at_once_are_read_silently(tmp_path: Path, capsys, monkeypatch):
    monkeypatch.setattr(warn_waiting_on_named_pipe, "SECONDS", 60.0)  # beside other work a thread may start late
    (tmp_path / "file").write_text("a")
    assert data_config._read_words(str(tmp_path / "file")) == ["a"]
    os.mkfifo(tmp_path / "pipe")
    writer = threading.Thread(target=(tmp_path / "pipe").write_text, args=["b"])
    writer.start()
    assert data_config._read_words(str(tmp_path / "pipe")) == ["b"]
    writer.join()
    assert not capsys.readouterr().err
