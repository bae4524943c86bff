"""A folder's tokenizer goes in and out: the same bytes, the same ids, in a spelling that transformers 4 reads too."""

import json
from pathlib import Path

import pytest
from tokenizer_folders import FOLDERS, TEXTS, write_in

from megatron.convert.hf_provenance_and_tokenizer_files import Provenance, readable_by_transformers_4
from megatron.core.dist_checkpointing.manifest_format import CheckpointError
from megatron.core.tokenizers import TokenizerConfig, build_tokenizer
from megatron.core.tokenizers.hf_special_tokens import TokenizerFiles, special_tokens_by_version
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
    assert readable_by_transformers_4({"tokenizer_config.json": text}) == {"tokenizer_config.json": text}


def respelled(config: dict, tokens_map: dict | None = None) -> tuple[dict, dict | None]:
    """What is written of (tokenizer_config.json, special_tokens_map.json)."""
    files = {"tokenizer_config.json": json.dumps(config).encode()}
    if tokens_map is not None:
        files["special_tokens_map.json"] = json.dumps(tokens_map).encode()
    written = {name: json.loads(data) for name, data in readable_by_transformers_4(files).items()}
    return written["tokenizer_config.json"], written.get("special_tokens_map.json")


def test_tokens_with_names_stay_as_they_are():
    """An object under the key is 4's own meaning of it."""
    config = {"tokenizer_class": "TokenizersBackend", "extra_special_tokens": {"image_token": "<i>"}, "x": "ü"}
    assert respelled(config)[0] == config | {"tokenizer_class": "PreTrainedTokenizerFast"}


LISTS = [
    ({"extra_special_tokens": ["<a>"]}, None),
    ({"extra_special_tokens": ["<a>"], "additional_special_tokens": ["<b>"]}, None),
    ({"extra_special_tokens": [], "additional_special_tokens": ["<b>"]}, None),
    ({"extra_special_tokens": [{"content": "<a>", "lstrip": True}, "<b>"]}, {"bos_token": "<s>"}),
    ({"additional_special_tokens": ["<b>"]}, {"extra_special_tokens": ["<a>", "<b>"]}),
    ({}, {"extra_special_tokens": ["<a>"], "additional_special_tokens": ["<b>"]}),
    ({"extra_special_tokens": ["<a>"], "added_tokens_decoder": {}}, {"extra_special_tokens": ["<c>"]}),
]


@pytest.mark.parametrize("kind", ["TokenizersBackend", "PreTrainedTokenizerFast", "Qwen2Tokenizer", "GPT2Tokenizer"])
@pytest.mark.parametrize(("config", "tokens_map"), LISTS)
def test_a_list_under_the_new_key_is_written_so_that_both_versions_read_it(
    kind: str, config: dict, tokens_map: dict | None, tmp_path: Path
):
    """transformers 4.57 cannot read a list there, whatever the class; 5 gives the tokens of the folder as it was."""
    pytest.importorskip("tokenizers")
    config = config | {"tokenizer_class": kind}

    def special_tokens(name: str, files: tuple[dict, dict | None]) -> list:
        folder = tmp_path / name
        folder.mkdir()
        for file, content in zip(("tokenizer_config.json", "special_tokens_map.json"), files):
            if content is not None:
                (folder / file).write_text(json.dumps(content))
        read = TokenizerFiles.read_beside(str(folder / "tokenizer.json"))
        return special_tokens_by_version(read, [], is_byte_level=False)

    before = special_tokens("before", (config, tokens_map))
    after = special_tokens("after", respelled(config, tokens_map))
    assert len(before) == 1, "only 5 can read the folder as it was"
    assert [found.version for found in after] == ["4.57", "5.x"]
    assert [token.content for token in after[1].added] == [token.content for token in before[0].added]
    assert {token.content for token in after[0].added} == {token.content for token in after[1].added}


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
