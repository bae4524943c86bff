"""Tokenizers: round trips, their special ids, and what is said when a file or a package is missing."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from megatron.core.base.dataclass_flags import ConfigError
from megatron.core.tokenizers import TokenizerConfig, build_tokenizer

tokenizers = pytest.importorskip("tokenizers")

ROOT = Path(__file__).resolve().parents[3]
GPT2 = [ROOT.parent / "shared/data" / name for name in ("gpt2-vocab.json", "gpt2-merges.txt")]
TEXTS = ["Hello world", "  two  spaces\n\nand lines\t", "na\u00efve \u4f60\u597d \U0001f600", "", "<|endoftext|>"]


def byte_level(special):
    """A trained byte-level BPE with these special tokens."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(["the cat sat on the mat " * 4], trainer)
    return tokenizer


@pytest.fixture
def small_gpt2(tmp_path):
    """vocab.json and merges.txt: the 256 byte characters, two merges, end of text."""
    characters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate([*characters, "th", "the", "<|endoftext|>"])}
    (tmp_path / "vocab.json").write_text(json.dumps(vocab))
    (tmp_path / "merges.txt").write_text("#version: 0.2\nt h\nth e\n")
    return TokenizerConfig("GPT2BPETokenizer", str(tmp_path / "vocab.json"), str(tmp_path / "merges.txt"))


def test_gpt2_bpe_from_vocab_and_merges(small_gpt2):
    tokenizer = build_tokenizer(small_gpt2)
    assert (tokenizer.name, tokenizer.vocab_size, tokenizer.eod, tokenizer.pad) == ("GPT2BPETokenizer", 259, 258, None)
    assert tokenizer.tokenize("thethth") == [257, 256, 256]
    for text in TEXTS:
        assert tokenizer.detokenize(tokenizer.tokenize(text)) == text
        assert tokenizer.eod not in tokenizer.tokenize(text), "text cannot end a document"


@pytest.mark.skipif(not all(path.exists() for path in GPT2), reason="needs the vocabulary files of GPT-2")
def test_gpt2_vocabulary_gives_the_published_ids():
    tokenizer = build_tokenizer(TokenizerConfig("GPT2BPETokenizer", *map(str, GPT2)))
    assert (tokenizer.vocab_size, tokenizer.eod) == (50257, 50256)
    assert tokenizer.tokenize("Hello world") == [15496, 995]
    for text in TEXTS:
        assert tokenizer.detokenize(tokenizer.tokenize(text)) == text


@pytest.mark.parametrize(
    ("special", "eod", "pad"),
    [
        (["<|endoftext|>"], 0, None),
        (["<pad>", "</s>"], 1, 0),
        (["<s>", "</s>", "<|endoftext|>"], 2, None),  # the first name of the list wins, not the first token
    ],
)
def test_huggingface_tokenizer_finds_its_special_tokens(tmp_path, special, eod, pad):
    byte_level(special).save(str(tmp_path / "tokenizer.json"))
    for path in (tmp_path / "tokenizer.json", tmp_path):
        tokenizer = build_tokenizer(TokenizerConfig("HuggingFaceTokenizer", tokenizer_model=str(path)))
        assert (tokenizer.name, tokenizer.eod, tokenizer.pad) == ("HuggingFaceTokenizer", eod, pad)
    assert max(tokenizer.tokenize("the cat \u00ff")) < tokenizer.vocab_size
    for text in TEXTS:
        assert tokenizer.detokenize(tokenizer.tokenize(text)) == text


def test_null_tokenizer_reads_numbers():
    tokenizer = build_tokenizer(TokenizerConfig("NullTokenizer", vocab_size=10))
    assert (tokenizer.name, tokenizer.vocab_size, tokenizer.eod, tokenizer.pad) == ("NullTokenizer", 11, 10, None)
    assert tokenizer.tokenize(" 5 0\n10 ") == [5, 0, 10]
    assert tokenizer.tokenize("") == []
    assert tokenizer.detokenize([5, 0, 10]) == "5 0 10"
    assert build_tokenizer(TokenizerConfig("NullTokenizer", vocab_size=10, null_tokenizer_eod_id=0)).eod == 0
    with pytest.raises(ValueError, match="'x'"):
        tokenizer.tokenize("1 x")
    with pytest.raises(ValueError, match=r"(?s)-1.*3.*0.*10"):
        tokenizer.tokenize("3 -1")


SETTINGS_AND_PROBLEMS = [
    ({"tokenizer_type": "GPT2BPETokenizer"}, ["needs --vocab-file", "needs --merge-file"]),
    ({"tokenizer_type": "HuggingFaceTokenizer"}, ["needs --tokenizer-model"]),
    ({"tokenizer_type": "NullTokenizer"}, ["needs --vocab-size"]),
    ({"vocab_size": 0}, ["must be at least 1"]),
    ({"vocab_size": 4, "null_tokenizer_eod_id": 5}, ["--null-tokenizer-eod-id (5) must be between"]),
]


@pytest.mark.parametrize(("settings", "problems"), SETTINGS_AND_PROBLEMS)
def test_config_problems_name_the_flag(settings, problems):
    with pytest.raises(ConfigError) as caught:
        TokenizerConfig(**settings)
    assert len(caught.value.problems) == len(problems)
    assert all(expected in problem for expected, problem in zip(problems, caught.value.problems))


def test_unusable_files_are_named(tmp_path, small_gpt2):
    def refused(error, reason, *settings, **more):
        with pytest.raises(error, match=reason):
            build_tokenizer(TokenizerConfig(*settings, **more))

    vocab, merges = small_gpt2.vocab_file, small_gpt2.merge_file
    nothing, empty = str(tmp_path / "nothing"), tmp_path / "empty"
    empty.write_text("{}")
    refused(FileNotFoundError, "--vocab-file .*nothing: there is no such file", "GPT2BPETokenizer", nothing, merges)
    refused(FileNotFoundError, "--merge-file .*nothing: there is no such file", "GPT2BPETokenizer", vocab, nothing)
    refused(ValueError, "do not form a BPE vocabulary", "GPT2BPETokenizer", merges, merges)
    (tmp_path / "none.txt").write_text("#version: 0.2\n")
    refused(ValueError, "has no <.endoftext.>", "GPT2BPETokenizer", str(empty), str(tmp_path / "none.txt"))
    refused(FileNotFoundError, "--tokenizer-model .*nothing.* Hub", "HuggingFaceTokenizer", tokenizer_model=nothing)
    refused(ValueError, "empty is not a tokenizer.json", "HuggingFaceTokenizer", tokenizer_model=str(empty))
    refused(ValueError, "set --tokenizer-type to one of BertWordPieceLowerCase, .*, NullTokenizer")


def test_a_missing_library_is_named(monkeypatch, small_gpt2):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(ImportError, match="pip install tokenizers"):
        build_tokenizer(small_gpt2)
    assert build_tokenizer(TokenizerConfig("NullTokenizer", vocab_size=10)).eod == 10


def test_pure_files_load_neither_torch_nor_the_tokenizer_library():
    code = (
        "import sys, megatron.core.tokenizers as t, megatron.core.datasets as d; t.build_tokenizer; d.IndexedDataset; "
        "d.requested_samples; d.build_gpt_datasets; print([m for m in ('torch', 'tokenizers') if m in sys.modules])"
    )
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"


def test_unknown_names_of_the_packages_are_attribute_errors():
    import megatron.core.datasets
    import megatron.core.tokenizers

    for package in (megatron.core.datasets, megatron.core.tokenizers):
        with pytest.raises(AttributeError, match="has no attribute 'nonsense'"):
            package.nonsense  # noqa: B018
        assert all(getattr(package, name) for name in dir(package))
