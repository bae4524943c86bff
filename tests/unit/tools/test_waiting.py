"""A pipe that no program writes, and standard input without text, are waited for with a line, in each tool that reads them."""

import io
import os
import sys
import threading
import time

import pytest

from tools import generate, train_tokenizer, waiting
from tools.preprocessing.sources import read_pieces

TEXT = b'{"text": "some words"}\n'


@pytest.fixture
def pipe(tmp_path, monkeypatch):
    """The path of a pipe into which a program writes when the reader has said that it waits."""
    monkeypatch.setattr(waiting, "_SECONDS", 0.05)
    os.mkfifo(tmp_path / "pipe.jsonl")
    has_said = threading.Event()
    say = waiting._say

    def say_and_tell(line: str) -> None:
        say(line)
        has_said.set()

    monkeypatch.setattr(waiting, "_say", say_and_tell)

    def write():
        has_said.wait(20)
        (tmp_path / "pipe.jsonl").write_bytes(TEXT)

    writer = threading.Thread(target=write)
    writer.start()
    yield str(tmp_path / "pipe.jsonl")
    writer.join()


READERS = {
    "preprocess_data": lambda path: [chunk.text for piece in read_pieces([path], ["text"]) for chunk in piece.chunks],
    "train_tokenizer": lambda path: list(train_tokenizer.Texts([path], "text")),
    "generate": lambda path: generate.read_file("--prompt-file", path, ""),
}


@pytest.mark.parametrize("reader", READERS)
def test_a_pipe_without_a_writer_is_waited_for_with_a_line(reader, pipe, capsys):
    assert "some words" in str(READERS[reader](pipe))
    said = capsys.readouterr().err
    assert f"waiting for text from the pipe {pipe}, which no program has opened to write: " in said


@pytest.mark.parametrize("reader", ["preprocess_data", "generate"])
def test_standard_input_without_text_is_waited_for_with_a_line(reader, monkeypatch, capsys):
    monkeypatch.setattr(waiting, "_SECONDS", 0.05)

    class Slow(io.BytesIO):
        def read1(self, size=-1):
            time.sleep(0.2)
            return super().read1(size)

        def read(self, size=-1):
            time.sleep(0.2)
            return super().read(size)

    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(Slow(TEXT)))
    assert "some words" in str(READERS[reader]("-"))
    assert "waiting for text from standard input: " in capsys.readouterr().err


def test_a_file_is_read_without_a_word(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(waiting, "_SECONDS", 0.0001)
    (tmp_path / "a.jsonl").write_bytes(TEXT)
    for read in READERS.values():
        read(str(tmp_path / "a.jsonl"))
    assert capsys.readouterr().err == ""
