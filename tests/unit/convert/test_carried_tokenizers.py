"""A folder's tokenizer goes in and out: the same bytes, the same ids, in a spelling that transformers 4 reads too."""

import json
from pathlib import Path

import pytest
from tokenizer_folders import FOLDERS, TEXTS, write_in

from megatron.convert.hf_origin import Provenance, readable_by_transformers_4
from megatron.core.dist_checkpointing.manifest_format import CheckpointError
from megatron.core.tokenizers import TokenizerConfig, build_tokenizer
from tools import checkpoint_convert

OURS = {
    "tokenizer.json": ("HuggingFaceTokenizer", "tokenizer_model"),
    "vocab.txt": ("BertWordPieceCase", "vocab_file"),
    "tokenizer.model": ("GPTSentencePieceTokenizer", "tokenizer_model"),
}


@pytest.mark.parametrize("name", FOLDERS)
def test_what_goes_in_comes_out(name: str, tmp_path: Path):
    pytest.importorskip("sentencepiece" if name == "tokenizer.model" else "tokenizers")
    folder, out = write_in(tmp_path, name), tmp_path / "out"
    assert checkpoint_convert.main(["--load", str(folder), "--save-hf", str(out)]) == 0
    weights = ("config.json", "model")
    files = [path.name for path in folder.iterdir() if not path.name.startswith(weights)]
    assert sorted(files) == sorted(path.name for path in out.iterdir() if not path.name.startswith(weights))
    for file in files:
        before, after = (folder / file).read_bytes(), (out / file).read_bytes()
        assert before == after or (name, file) == ("tokenizer.json", "tokenizer_config.json"), file
    kind, setting = OURS[name]
    one, other = (build_tokenizer(TokenizerConfig(kind, **{setting: str(root / name)})) for root in (folder, out))
    found = [one.tokenize(text) for text in TEXTS]
    assert found == [other.tokenize(text) for text in TEXTS] and all(found)
    if name == "tokenizer.json":
        assert found == json.loads((tmp_path / "ids.json").read_text())
        written = json.loads((out / "tokenizer_config.json").read_text())
        assert written["tokenizer_class"] == "PreTrainedTokenizerFast" and "extra_special_tokens" not in written
        assert written["additional_special_tokens"] == ["</s>", "<|tool|>"]


@pytest.mark.parametrize(
    "text",
    [
        b'{"tokenizer_class":  "LlamaTokenizerFast"}',
        b'{"tokenizer_class": ["TokenizersBackend"]}',
        b'["TokenizersBackend"]',
        b"\xff{",
        b"[" * 100_000,
        b"",
    ],
)
def test_any_other_content_is_carried_to_the_byte(text: bytes):
    assert readable_by_transformers_4(text) == text


def test_what_both_versions_would_read_otherwise_stays():
    """Tokens with names, 4's own meaning of the key, and a list that is there under the older name."""
    config = {"tokenizer_class": "TokenizersBackend", "extra_special_tokens": {"image_token": "<i>"}, "x": "ü"}
    written = json.loads(readable_by_transformers_4(json.dumps(config).encode()))
    assert written == config | {"tokenizer_class": "PreTrainedTokenizerFast"}
    config |= {"extra_special_tokens": ["a"], "additional_special_tokens": ["b"]}
    assert json.loads(readable_by_transformers_4(json.dumps(config).encode()))["extra_special_tokens"] == ["a"]


@pytest.mark.parametrize(
    ("generation", "config", "ends"),
    [
        ('{"eos_token_id": [7, 9]}', {"eos_token_id": 2}, [7, 9]),
        ('{"eos_token_id": 7}', {}, [7]),
        ('{"pad_token_id": 7}', {"eos_token_id": [2, 3]}, [2, 3]),
        (None, {"eos_token_id": 2}, [2]),
        (None, {}, []),
    ],
)
def test_a_text_ends_with_the_ids_of_the_folder(generation: str | None, config: dict, ends: list[int], tmp_path: Path):
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(generation)
    origin = Provenance.of({"model_type": "llama"} | config, tmp_path)
    assert origin.end_ids() == origin.with_files(print).end_ids() == ends


@pytest.mark.parametrize("text", ['{"eos_token_id": "2"}', "{", "[]"])
def test_ends_of_text_that_are_no_ids_are_refused(text: str, tmp_path: Path):
    (tmp_path / "generation_config.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"generation_config\.json"):
        Provenance.of({"model_type": "llama"}, tmp_path).end_ids()
