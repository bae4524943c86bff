"""The data tools, run as a user runs them: text in, token files and one-line messages out."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from said import tells
from token_files import NULL, contents

from megatron.core.datasets.mmap_indexed_dataset import IndexedDataset
from megatron.core.tokenizers import TokenizerConfig, build_tokenizer
from tools import preprocess_data, train_tokenizer

TOOLS = Path(preprocess_data.__file__).parent


def write_lines(path, *lines):
    path.write_bytes(b"".join(line if isinstance(line, bytes) else json.dumps(line).encode() + b"\n" for line in lines))
    return str(path)


def preprocess(*arguments):
    return preprocess_data.main([*map(str, arguments)])


def test_lines_become_documents_of_each_key(tmp_path):
    first = write_lines(tmp_path / "a.jsonl", {"text": "1 2", "title": "9"}, b"\n", {"text": "", "title": "8"})
    second = write_lines(tmp_path / "b.jsonl", {"title": ["3", "", "4 5"], "text": ["6", ""]})
    arguments = ["--input", first, second, "--output-prefix", tmp_path / "new" / "out", *NULL]
    assert preprocess(*arguments, "--json-keys", "text", "title", "--append-eod") == 0
    assert contents(tmp_path / "new" / "out_text_document") == [[[1, 2, 100]], [], [[6, 100]]]
    assert contents(tmp_path / "new" / "out_title_document") == [[[9, 100]], [[8, 100]], [[3], [4, 5, 100]]]
    assert preprocess(*arguments) == 0
    assert contents(tmp_path / "new" / "out_text_document") == [[[1, 2]], [], [[6]]]


def test_flags_that_nothing_reads_are_named(tmp_path, capsys):
    """The files are those of the run without them."""
    source = write_lines(tmp_path / "a.jsonl", {"text": "1 2"})
    assert preprocess("--input", source, "--output-prefix", tmp_path / "plain", *NULL) == 0
    assert "no effect" not in capsys.readouterr().err
    vain = ["--tokenizer-model", tmp_path / "x", "--keep-newlines", "--lang", "german"]
    assert preprocess("--input", source, "--output-prefix", tmp_path / "o", *NULL, *vain) == 0
    told = [line for line in capsys.readouterr().err.splitlines() if "no effect here" in line]
    assert len(told) == 3 and all(line.startswith("preprocess_data: ") for line in told)
    assert tells(told, "--tokenizer-model NullTokenizer --keep-newlines --lang --split-sentences")
    assert contents(tmp_path / "o_text_document") == contents(tmp_path / "plain_text_document")


def test_a_mark_at_the_start_of_a_file_is_passed_over(tmp_path):
    """Editors on Windows write the byte-order mark in front of UTF-8. Elsewhere it is a character like others."""
    source = tmp_path / "a.jsonl"
    source.write_bytes(b'\xef\xbb\xbf{"text": "1 2"}\n{"text": "3"}\n')
    assert preprocess("--input", source, source, "--output-prefix", tmp_path / "o", *NULL) == 0
    assert contents(tmp_path / "o_text_document") == [[[1, 2]], [[3]]] * 2
    source.write_bytes(b'{"text": "1 2"}\n\xef\xbb\xbf{"text": "3"}\n')
    assert preprocess("--input", source, "--output-prefix", tmp_path / "o", *NULL) == 1


@pytest.mark.parametrize(("vocab", "dtype"), [(65498, np.uint16), (65499, np.int32)])
def test_dtype_counts_the_end_of_document_id(tmp_path, vocab, dtype):
    source = write_lines(tmp_path / "a.jsonl", {"text": "0"})
    flags = ["--tokenizer-type", "NullTokenizer", "--vocab-size", vocab, "--append-eod"]
    assert preprocess("--input", source, "--output-prefix", tmp_path / "o", *flags) == 0
    dataset = IndexedDataset(tmp_path / "o_text_document")
    assert (dataset.dtype, dataset[0].tolist()) == (dtype, [0, vocab])


@pytest.mark.full
def test_workers_write_the_same_bytes_from_any_directory(tmp_path):
    lines = [{"text": " ".join(str((i * j) % 97) for j in range(i % 53))} for i in range(10_000)]  # 0.8 MB: 4 pieces
    source = write_lines(tmp_path / "a.jsonl", *lines)
    command = [sys.executable, TOOLS / "preprocess_data.py", "--input", source, *NULL, "--append-eod"]
    run = subprocess.run(
        [*command, "--output-prefix", "two", "--workers", "2", "--log-interval", "1000"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
    progress = [line for line in run.stderr.splitlines() if not line.startswith("done")]
    assert len(progress) == 4, "one for each piece, which is more than 1000 documents"
    assert all(word in line for line in progress for word in (" docs/s, ", " MB/s, ", "%, ", " left"))
    assert preprocess("--input", source, "--output-prefix", tmp_path / "one", *NULL, "--append-eod") == 0
    for ending in ("bin", "idx"):
        one, two = (tmp_path / f"{name}_text_document.{ending}" for name in ("one", "two"))
        assert one.read_bytes() == two.read_bytes()


BAD_LINES = {
    "json": (b'{"text": "1"\n', "JSON 13 ,"),
    "utf-8": (b'{"text": "\xff"}\n', "UTF-8 10"),
    "surrogate": (b'{"text": "\\ud800"}\n', "0"),
    "array": (b"[1]\n", "JSON"),
    "key": (b'{"txt": "1"}\n', "text txt"),
    "number": (b'{"text": 5}\n', "text"),
    "token": (b'{"text": "x"}\n', "NullTokenizer"),
}


@pytest.mark.parametrize("kind", BAD_LINES)
def test_a_bad_line_is_located_and_stops_the_run_or_is_skipped(tmp_path, capsys, kind):
    bad, reason = BAD_LINES[kind]
    source = write_lines(tmp_path / "a.jsonl", {"text": "1"}, b"  \n", bad, {"text": "2"})
    arguments = ["--input", source, "--output-prefix", tmp_path / "o", *NULL]
    assert preprocess(*arguments) == 1
    error = capsys.readouterr().err
    assert tells(error, f"preprocess_data {source}:3 {reason}")
    assert error.count("\n") == 1
    assert os.listdir(tmp_path) == ["a.jsonl"], "no half-made output"

    assert preprocess(*arguments, "--on-error", "skip") == 0
    error = capsys.readouterr().err
    assert tells(error, f"{source}:3 {reason}") and "1 lines" in error
    assert contents(tmp_path / "o_text_document") == [[[1]], [[2]]]


@pytest.mark.parametrize("text", ["It was the best of times,\n", "1859\n"])
def test_plain_text_is_told_where_json_lines_come_from(tmp_path, capsys, text):
    (tmp_path / "plain.txt").write_text(text)
    assert preprocess("--input", tmp_path / "plain.txt", "--output-prefix", tmp_path / "o", *NULL) == 1
    error = capsys.readouterr().err
    assert tells(error, f"preprocess_data {tmp_path}/plain.txt:1") and error.count("\n") == 1
    assert tells(error, "JSON docs/data_preparation.md 1")
    assert preprocess("--input", write_lines(tmp_path / "a.jsonl", b"x\n"), "--output-prefix", "o", *NULL) == 1
    assert "plain text" not in capsys.readouterr().err


def test_a_bad_line_stops_workers_too(tmp_path, capsys):
    source = write_lines(tmp_path / "a.jsonl", *[{"text": "1"}] * 700, b"{\n")
    assert preprocess("--input", source, "--output-prefix", tmp_path / "o", *NULL, "--workers", 2) == 1
    assert f"{source}:701: not valid JSON" in capsys.readouterr().err
    assert os.listdir(tmp_path) == ["a.jsonl"]


def test_skipped_lines_are_shown_up_to_a_number(tmp_path, capsys):
    source = write_lines(tmp_path / "a.jsonl", {"text": "1"}, *[b"{\n"] * 300)
    arguments = ["--input", source, "--output-prefix", tmp_path / "o", *NULL]
    assert preprocess(*arguments, "--on-error", "skip") == 0
    error = capsys.readouterr().err
    assert error.count("\nskipped") + error.startswith("skipped") == 20
    assert "300 lines skipped" in error


ARGUMENTS_AND_REASONS = [
    ([], 2, "--input --output-prefix"),
    (["--input", "a", "--output-prefix", "o", "--workers", "0"], 2, "--workers 0 1"),
    (["--input", "a", "--output-prefix", "o", "--log-interval", "0"], 2, "--log-interval 0 1"),
    (["--inputs", "a"], 2, "--inputs --input"),
    (["stray"], 2, "stray does not belong to any flag"),
    (["--workers", "x"], 2, "--workers x"),
    (["--input", "none.jsonl", "--output-prefix", "o", *NULL], 1, "--input none.jsonl"),
    (["--input", ".", "--output-prefix", "o", *NULL], 1, "empty.json"),
    (["--input", "empty.json", "--output-prefix", "o"], 1, "set --tokenizer-type"),
    (["--input", "empty.json", "--output-prefix", "empty.json/o", *NULL], 1, "empty.json"),
    (["--input", "empty.json", "--tokenizer-type", "NullTokenizer"], 2, "--output-prefix"),
]


@pytest.mark.parametrize(("arguments", "code", "reason"), ARGUMENTS_AND_REASONS)
def test_mistakes_are_one_line(tmp_path, monkeypatch, capsys, arguments, code, reason):
    monkeypatch.chdir(tmp_path)
    Path("empty.json").write_text("\n")
    assert preprocess(*arguments) == code
    error = capsys.readouterr().err
    assert error.startswith("preprocess_data: ")
    assert tells(error, reason) and error.count("\n") == 1


def test_a_worker_that_dies_is_reported(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(preprocess_data, "_start_worker", os.abort)  # called with arguments that it does not take
    source = write_lines(tmp_path / "a.jsonl", {"text": "1"})
    assert preprocess("--input", source, "--output-prefix", tmp_path / "o", *NULL, "--workers", 2) == 1
    assert tells(capsys.readouterr().err, "--workers")


def train(*arguments):
    return train_tokenizer.main([*map(str, arguments)])


def test_a_trained_tokenizer_is_the_same_every_time_and_writes_any_text(tmp_path, capsys):
    pytest.importorskip("tokenizers")
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.txt").write_text("the cat sat on the mat\n\n" * 20)
    write_lines(tmp_path / "in" / "b.jsonl", {"body": "the dog"}, {"body": ["the log", "a fog"]})
    outputs = [tmp_path / "new" / name for name in ("1.json", "2.json")]
    for output in outputs:
        arguments = ["--input", tmp_path / "in", "--json-key", "body", "--vocab-size", 270, "--output", output]
        assert train(*arguments) == 0
        assert f"wrote {output}: 270 ids\n" in capsys.readouterr().err
    assert outputs[0].read_bytes() == outputs[1].read_bytes()
    tokenizer = build_tokenizer(TokenizerConfig("HuggingFaceTokenizer", tokenizer_model=str(outputs[0])))
    assert (tokenizer.vocab_size, tokenizer.eod) == (270, 0)
    assert len(tokenizer.tokenize("the")) == 1
    for text in ("the cat", "\u4f60\u597d \x00\n  "):
        assert tokenizer.detokenize(tokenizer.tokenize(text)) == text


@pytest.mark.parametrize(
    ("kind", "count"),
    [("bpe", 256 + 1 + 1), ("wordpiece", 5 + 2 * 2 + 1)],  # bytes, end of document, "ab"; special, letters twice, "ab"
)
def test_a_text_too_small_for_the_vocabulary_is_said(tmp_path, capsys, kind, count):
    pytest.importorskip("tokenizers")
    (tmp_path / "a.txt").write_text("ab\n")
    output = tmp_path / "out"
    assert train("--input", tmp_path / "a.txt", "--kind", kind, "--vocab-size", 300, "--output", output) == 0
    error = capsys.readouterr().err
    assert tells(error, f"{output} {count} --vocab-size 300")


def test_a_tokenizer_has_the_special_tokens_that_are_asked_for(tmp_path):
    pytest.importorskip("tokenizers")
    (tmp_path / "a.txt").write_text("the cat sat on the mat\n" * 5)
    arguments = ["--input", tmp_path / "a.txt", "--output", tmp_path / "t.json", "--vocab-size", "262"]
    assert train(*arguments, "--special-tokens", "<a>", "<b>") == 0
    tokenizer = build_tokenizer(TokenizerConfig("HuggingFaceTokenizer", tokenizer_model=str(tmp_path / "t.json")))
    assert [tokenizer.vocab[name] for name in ("<|endoftext|>", "<a>", "<b>")] == [0, 1, 2]


def test_characters_are_numbered_in_order_and_others_are_unknown(tmp_path, capsys):
    pytest.importorskip("tokenizers")
    (tmp_path / "a.txt").write_text("b\u00e4a ba\n\n")
    arguments = [
        "--kind",
        "char",
        "--input",
        tmp_path / "a.txt",
        "--special-tokens",
        "<a>",
        "--output",
        tmp_path / "t.json",
    ]
    assert train(*arguments) == 0
    assert "8 ids\n" in capsys.readouterr().err
    tokenizer = build_tokenizer(TokenizerConfig("HuggingFaceTokenizer", tokenizer_model=str(tmp_path / "t.json")))
    assert tokenizer.vocab == {"<|endoftext|>": 0, "<unk>": 1, "<a>": 2, "\n": 3, " ": 4, "a": 5, "b": 6, "\u00e4": 7}
    assert (tokenizer.eod, tokenizer.vocab_size) == (0, 8)
    assert tokenizer.tokenize("ab \u00e4z\n") == [5, 6, 4, 7, 1, 3]
    assert tokenizer.detokenize([5, 6, 4, 7, 3, 0, 1]) == "ab \u00e4\n<|endoftext|><unk>"
    assert train(*arguments, "--vocab-size", 7) == 1
    assert tells(error := capsys.readouterr().err, "--vocab-size 7 5")
    assert "at least 8" in error


def test_word_pieces_are_the_same_every_time_and_serve_a_bert(tmp_path, capsys):
    """Any letter of the text is a piece, in capitals or not; others are unknown."""
    pytest.importorskip("tokenizers")
    (tmp_path / "a.txt").write_text("The cat sat on the m\u00e4t, on THE mat. \u4f60\n" * 20)
    outputs = [tmp_path / name for name in ("1.txt", "2.txt")]
    for output in outputs:
        arguments = ["--kind", "wordpiece", "--input", tmp_path / "a.txt", "--vocab-size", 50, "--output", output]
        assert train(*arguments) == 0
        assert f"wrote {output}: " in capsys.readouterr().err
    assert outputs[0].read_bytes() == outputs[1].read_bytes()
    tokenizer = build_tokenizer(TokenizerConfig("BertWordPieceLowerCase", vocab_file=str(outputs[0])))
    assert (tokenizer.pad, tokenizer.cls, tokenizer.sep, tokenizer.mask) == (0, 2, 3, 4)
    assert tokenizer.tokenize("The") == tokenizer.tokenize("the") == [tokenizer.vocab["the"]]
    assert [tokenizer.inv_vocab[i] for i in tokenizer.tokenize("tt\u4f60z")] == ["t", "##t", "\u4f60", "[UNK]"]
    assert train("--kind", "wordpiece", "--input", tmp_path / "a.txt", "--vocab-size", 9, "--output", outputs[0]) == 1
    assert tells(capsys.readouterr().err, "--vocab-size 9")


def test_a_tokenizer_learns_no_mark_at_the_start_of_a_file(tmp_path):
    pytest.importorskip("tokenizers")
    for name, start in (("marked", b"\xef\xbb\xbf"), ("plain", b"")):
        (tmp_path / f"{name}.txt").write_bytes(start + b"the cat sat on the mat\n" * 3)
        output = tmp_path / f"{name}.json"
        assert train("--input", tmp_path / f"{name}.txt", "--vocab-size", 262, "--output", output) == 0
    assert (tmp_path / "marked.json").read_bytes() == (tmp_path / "plain.json").read_bytes()


@pytest.mark.parametrize(
    ("arguments", "code", "reason"),
    [
        ([], 2, "--input --output"),
        (["--input", "a", "--output", "o", "--vocab-size", "256"], 2, "--vocab-size 256 257"),
        (["--input", "a", "--output", "o", "--special-tokens", "x", "x"], 2, "--special-tokens"),
        (["--input", "a", "--output", "o", "--vocab-size", "258", "--special-tokens", "x", "y"], 2, "259"),
        (["--vocab", "5"], 2, "--vocab --vocab-size"),
        (["--input", "*.none", "--output", "o"], 1, "--input"),
        (["--input", "bad.jsonl", "--output", "o"], 1, "bad.jsonl:2 text x"),
        (["--input", "empty.txt", "--output", "o"], 1, "--input"),
        (["--input", "bad.txt", "--output", "o"], 1, "bad.txt:1 UTF-8 1"),
    ],
)
def test_training_mistakes_are_one_line(tmp_path, monkeypatch, capsys, arguments, code, reason):
    pytest.importorskip("tokenizers")
    monkeypatch.chdir(tmp_path)
    write_lines(tmp_path / "bad.jsonl", {"text": "a"}, {"x": 1})
    (tmp_path / "bad.txt").write_bytes(b"a\xff\n")
    (tmp_path / "empty.txt").write_bytes(b"\n \n")
    assert train(*arguments) == code
    error = capsys.readouterr().err
    assert error.startswith("train_tokenizer: ")
    assert tells(error, reason) and error.count("\n") == 1
    assert sorted(os.listdir(tmp_path)) == ["bad.jsonl", "bad.txt", "empty.txt"]


def test_training_without_the_library_says_what_to_install(tmp_path, monkeypatch, capsys):
    (tmp_path / "a.txt").write_text("a")
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    assert train("--input", tmp_path / "a.txt", "--output", tmp_path / "o") == 1
    assert tells(capsys.readouterr().err, "pip install tokenizers")
