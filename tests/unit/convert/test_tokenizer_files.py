"""The tokenizer of a run that did not begin as a folder is written as files that give the same ids."""

import json
from pathlib import Path

import pytest

from megatron.convert.hf_provenance_and_tokenizer_files import write_aux_files
from megatron.convert.read_hf_token_to_id import read_bos_eos_ids
from megatron.convert.write_tokenizer_as_hf_files import files_of_tokenizer
from megatron.core.tokenizers import TokenizerConfig, build_tokenizer
from megatron.core.tokenizers.tokenizer_sha256 import tokenizer_sha256

tokenizers = pytest.importorskip("tokenizers")

TEXTS = ["lower Lowest", " new\n\nnewer", "\u00e9t\u00e9 \u4e2d 7", ""]
BYTES = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())


def gpt2(folder: Path) -> dict:
    vocab = {token: i for i, token in enumerate([*BYTES, "lo", "low", "er", "<|endoftext|>"])}
    (folder / "my-vocab.json").write_text(json.dumps(vocab))
    (folder / "my-merges.txt").write_text("#version: 0.2\nl o\nlo w\ne r\n")
    files = {"vocab_file": str(folder / "my-vocab.json"), "merge_file": str(folder / "my-merges.txt")}
    return {"tokenizer_type": "GPT2BPETokenizer"} | files


def bert(folder: Path, kind: str = "BertWordPieceLowerCase") -> dict:
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "low", "Low", "##er", "##est", "new", "et", "##e", "7"]
    (folder / "words.txt").write_text("\n".join(words) + "\n")
    return {"tokenizer_type": kind, "vocab_file": str(folder / "words.txt")}


def hugging_face(folder: Path) -> dict:
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel({"low": 0, "new": 1, "[UNK]": 2}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "of-mine.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>", "bos_token": "low"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text("{}")
    return {"tokenizer_type": "HuggingFaceTokenizer", "tokenizer_model": str(folder / "of-mine.json")}


def built(settings: dict):
    return build_tokenizer(TokenizerConfig(**settings))


@pytest.mark.parametrize("make", [gpt2, hugging_face])
def test_a_tokenizer_json_with_the_ids_of_the_run_is_written(make, tmp_path: Path):
    (tmp_path / "own").mkdir()
    settings = make(tmp_path / "own")
    (tmp_path / "out").mkdir()
    names = write_aux_files(files_of_tokenizer(settings, None, pytest.fail), tmp_path / "out")
    assert "tokenizer.json" in names and "generation_config.json" not in names
    written = built({"tokenizer_type": "HuggingFaceTokenizer", "tokenizer_model": str(tmp_path / "out")})
    own = built(settings)
    assert [written.tokenize(text) for text in TEXTS] == [own.tokenize(text) for text in TEXTS]
    assert written.eod == own.eod and written.vocab_size == own.vocab_size
    if make is gpt2:
        assert read_bos_eos_ids(tmp_path / "out") == {"bos_token_id": own.eod, "eos_token_id": own.eod}
        of_files = built(
            {"tokenizer_type": "GPT2BPETokenizer"}
            | {"vocab_file": str(tmp_path / "out/vocab.json"), "merge_file": str(tmp_path / "out/merges.txt")}
        )
        assert [of_files.tokenize(text) for text in TEXTS] == [own.tokenize(text) for text in TEXTS]


@pytest.mark.parametrize("kind", ["BertWordPieceLowerCase", "BertWordPieceCase"])
def test_a_vocab_txt_with_the_rules_of_the_run_is_written(kind: str, tmp_path: Path):
    (tmp_path / "tokenizer_config.json").write_text('{"strip_accents": false}')
    settings = bert(tmp_path, kind)
    (tmp_path / "out").mkdir()
    write_aux_files(files_of_tokenizer(settings, None, pytest.fail), tmp_path / "out")
    config = json.loads((tmp_path / "out/tokenizer_config.json").read_text())
    assert config["tokenizer_class"] == "BertTokenizer" and config["strip_accents"] is False
    assert config["do_lower_case"] is (kind == "BertWordPieceLowerCase")
    own = built(settings)
    written = built({"tokenizer_type": kind, "vocab_file": str(tmp_path / "out/vocab.txt")})
    assert [written.tokenize(text) for text in TEXTS] == [own.tokenize(text) for text in TEXTS]


def test_what_is_not_written_is_said(tmp_path: Path):
    said: list[str] = []
    settings = gpt2(tmp_path)
    sha256 = tokenizer_sha256(TokenizerConfig(**settings), built(settings))
    assert files_of_tokenizer(settings, sha256, pytest.fail)
    cases = {
        "had none with files": None,
        "none with the ids of a Llama2Tokenizer": {"tokenizer_type": "Llama2Tokenizer", "tokenizer_model": "x"},
        "no such file": settings | {"vocab_file": str(tmp_path / "gone")},
        "have changed since the run": settings,
    }
    (tmp_path / "my-merges.txt").write_text("#version: 0.2\nl o\n")
    for told, changed in cases.items():
        assert files_of_tokenizer(changed, sha256, said.append) == {}
        assert told in said[-1] and "--tokenizer DIR" in said[-1]
