"""Tokenizers that are not to be trusted: ids outside their own vocabulary, regular expressions that run away."""

import types

import numpy as np
import pytest

from tools import preprocess_data
from tools.preprocessing import encode
from tools.preprocessing.in_time import in_time

tokenizers = pytest.importorskip("tokenizers")


def write_tokenizer(path, pattern=r"\s", template_id=None):
    """A tokenizer.json of single letters, cut by `pattern`; with a template that puts an id of its own before each text."""
    ids = {letter: i for i, letter in enumerate("abcdefghijklmnopqrstuvwxyz ")}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(ids, []))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated")
    tokenizer.add_special_tokens(["<|endoftext|>"])
    if template_id is not None:
        tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", template_id)]
        )
    tokenizer.save(str(path))
    return path


@pytest.fixture
def run(tmp_path, capsys):
    """run(tokenizer.json, texts, *flags) -> (exit code, what is said, the files of the folder)"""

    def preprocess(path, texts, *flags):
        (tmp_path / "a.jsonl").write_text("".join(f'{{"text": "{text}"}}\n' for text in texts))
        arguments = ["--input", tmp_path / "a.jsonl", "--output-prefix", tmp_path / "o", *flags]
        kind = ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", path]
        code = preprocess_data.main([*map(str, [*arguments, *kind])])
        return code, capsys.readouterr().err, sorted(path.name for path in tmp_path.iterdir())

    return preprocess


@pytest.mark.parametrize("template_id", [28, 65541, 2**31, 2**32 - 1])
@pytest.mark.parametrize("flags", [[], ["--on-error", "skip"]])
def test_an_id_outside_the_vocabulary_is_not_written(tmp_path, run, template_id, flags):
    """65541 would be 5 in a file of uint16."""
    path = write_tokenizer(tmp_path / "t.json", template_id=template_id)
    code, said, files = run(path, ["", "a b", "c"], *flags)
    assert (code, files) == (1, ["a.jsonl", "t.json"])
    assert f"{tmp_path}/a.jsonl:1: HuggingFaceTokenizer {path} " in said and said.count("\n") == 1
    if template_id < 2**31:
        assert f"{template_id}" in said and "28 ids (0 to 27)" in said
    assert run(write_tokenizer(path, template_id=27), ["", "a b"])[0] == 0


def test_an_end_of_document_outside_the_vocabulary_is_refused():
    tokenizer = types.SimpleNamespace(name="Fork", vocab_size=10, eod=10, tokenize=lambda text: [1])
    encode.Encoder(tokenizer, ["text"], append_eod=False)
    with pytest.raises(ValueError, match=r"(?s)10.*10.*0.*9.*--append-eod"):
        encode.Encoder(tokenizer, ["text"], append_eod=True)


RUNS_AWAY = "(a|aa)+c"


@pytest.mark.full
def test_a_regular_expression_that_runs_away_is_a_line_s_error(tmp_path, run):
    """The library gives up after ten million steps, with a panic that is no Exception."""
    path = write_tokenizer(tmp_path / "t.json", RUNS_AWAY)
    texts = ["abc", "a" * 200, "c"]
    code, said, _ = run(path, texts, "--on-error", "skip")
    assert code == 0 and f"skipped {tmp_path}/a.jsonl:2: {path}: " in said


def test_a_tokenizer_that_comes_to_no_end_is_given_up(tmp_path, run, monkeypatch):
    """Below the library's limit at each word, but there are many words."""
    monkeypatch.setattr(encode, "_PATIENCE", 0.01)
    monkeypatch.setattr(encode, "_SLOWEST", 1e9)
    path = write_tokenizer(tmp_path / "t.json", RUNS_AWAY)
    code, said, files = run(path, ["abc", " ".join(["a" * 24] * 20)], "--on-error", "skip")
    assert (code, files) == (1, ["a.jsonl", "t.json"])
    assert f"{tmp_path}/a.jsonl:2: HuggingFaceTokenizer {path} " in said and said.count("\n") == 1


def test_what_is_done_in_time_gives_its_result_or_its_error():
    assert in_time(lambda: 5, 10) == 5
    with pytest.raises(ZeroDivisionError):
        in_time(lambda: 1 / 0, 10)
    assert np.array_equal(in_time(lambda: np.arange(3), 10), [0, 1, 2])


UNKNOWN = {  # tokenizers without an unknown token, of the letters a and b; each fails in words of its own
    "WordLevel": lambda: tokenizers.models.WordLevel({"a": 0, "b": 1, "<|endoftext|>": 2}),
    "WordLevel whose unknown token has another name": lambda: tokenizers.models.WordLevel(
        {"a": 0, "b": 1, "<|endoftext|>": 2}, unk_token="<oov>"
    ),
    "Unigram": lambda: tokenizers.models.Unigram([("a", -1.0), ("b", -2.0), ("<|endoftext|>", -9.0)]),
    "BPE": lambda: tokenizers.models.BPE({"a": 0, "b": 1, "<|endoftext|>": 2}, [], unk_token="<unk>"),
    "WordPiece": lambda: tokenizers.models.WordPiece({"a": 0, "b": 1, "<|endoftext|>": 2}, unk_token="[UNK]"),
}


UNKNOWN["WordLevel that does not know the letter a either"] = lambda: tokenizers.models.WordLevel(
    {"b": 0, "<|endoftext|>": 1}
)


@pytest.mark.parametrize("kind", UNKNOWN)
def test_a_text_that_the_tokenizer_cannot_encode_is_a_bad_line(tmp_path, run, kind):
    """The library raises bare Exception."""
    known = "b"
    tokenizer = tokenizers.Tokenizer(UNKNOWN[kind]())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(["<|endoftext|>"])
    tokenizer.save(str(tmp_path / "t.json"))
    texts = [known, "\u00e9 z", f"{known} {known}"]
    code, said, files = run(tmp_path / "t.json", texts)
    assert (code, files) == (1, ["a.jsonl", "t.json"])
    assert f"{tmp_path}/a.jsonl:2: {tmp_path}/t.json: the tokenizer cannot encode this: " in said
    assert "Traceback" not in said and "--on-error skip" in said
    code, said, files = run(tmp_path / "t.json", texts, "--on-error", "skip")
    assert code == 0 and f"skipped {tmp_path}/a.jsonl:2: " in said and "o_text_document.bin" in files
