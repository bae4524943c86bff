"""tools/index_cache.py lists what runs have left in their caches, and removes what is chosen and nothing else."""

import os
import re
import time
import types
from pathlib import Path

import pytest
from token_files import write

from megatron.core.datasets import DataConfig, build_gpt_datasets
from tools import index_cache

TOKENIZER = types.SimpleNamespace(vocab_size=1000, eod=999, pad=None)


def build(paths: list[str], length: int = 8, cache: Path | None = None) -> tuple:
    config = DataConfig(seq_length=length, data_path=paths, split="8,1,1", data_cache_path=cache and str(cache))
    return build_gpt_datasets(config, TOKENIZER, [20, 4, 4], 1)


@pytest.fixture
def data(tmp_path: Path) -> list[str]:
    return [write(tmp_path / name, [[[1] * length]] * 20) for name, length in (("a", 30), ("b", 31))]


def said(capsys, *words: object, code: int = 0) -> str:
    assert index_cache.main([*map(str, words)]) == code
    return "".join(capsys.readouterr())


def keys_in(text: str) -> list[str]:
    return re.findall(r"^  (?:removed )?([0-9a-f]{8})  ", text, re.MULTILINE)


def test_caches_beside_the_data_are_listed_and_removed_by_key(data, capsys):
    build([data[0]])
    build([data[0]], length=16)
    text = said(capsys, "--data-path", data[0])
    assert len(keys_in(text)) == 6 and text.splitlines()[-1].startswith("6 cache(s), ")
    assert "GPTDataset train, samples 20, seq-length 16, seed 1, elements 0 to 16: " in text
    folder = Path(f"{data[0]}/cache/GPTDataset_indices")
    files = {*os.listdir(folder)}
    key = keys_in(text)[2]
    text = said(capsys, "--data-path", data[0], "--remove", key)
    assert text.count("removed") == 2  # its line, and the sum
    gone = files - {*os.listdir(folder)}
    assert len(gone) == 4 and all(name.startswith(key) for name in gone), "three arrays and the description"
    train, valid, _ = build([data[0]])
    assert len(train) >= 20 and len(valid) >= 4


def test_old_ones_are_removed_by_age_and_those_of_others_never(data, tmp_path, capsys):
    """Megatron-LM's files have descriptions of another form; files without one may be those of a build that goes on."""
    cache = tmp_path / "cache"
    build(["0.5", data[0], "0.5", data[1]], cache=cache)
    others = [cache / f"{'0' * 32}-GPTDataset-train-{name}" for name in ("description.txt", "document_index.npy")]
    others.append(cache / f"{'1' * 32}-GPTDataset-train-document_index.npy")
    for path in others:
        path.write_text('{"class": "GPTDataset", "split": "train"}')
    listed = keys_in(said(capsys, "--data-cache-path", cache))
    assert len(listed) == 9 and "2 data sets" in said(
        capsys, "--data-cache-path", cache
    )  # 2 files and the order, of 3 splits
    assert len(keys_in(said(capsys, "--data-cache-path", cache, "--remove-older-than", 1))) == 9
    old = [path for path in cache.iterdir() if path.name.startswith(listed[0])]
    for path in (*old, *others):
        os.utime(path, (0, time.time() - 2 * 86400))
    said(capsys, "--data-cache-path", cache, "--remove-older-than", 1)
    assert not any(path.exists() for path in old) and all(path.exists() for path in others)
    said(capsys, "--data-cache-path", cache, "--remove", "all")
    assert {*cache.iterdir()} == {*others}


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--data-cache-path", "{cache}", "--remove", "ffff"], "no cache here has that key"),
        (["--data-cache-path", "{cache}", "--remove", "ff"], "at least 4 characters"),
        (["--data-cache-path", "{cache}", "--remove", "all", "--remove-older-than", "1"], "give one of them"),
        (["--data-cache-path", "{cache}x"], "is not a folder"),
        ([], "give --data-path"),
    ],
)
def test_what_names_nothing_removes_nothing(words, told, data, tmp_path, capsys):
    cache = tmp_path / "cache"
    build([data[0]], cache=cache)
    before = {*cache.iterdir()}
    assert told in said(capsys, *(word.format(cache=cache) for word in words), code=2)
    assert {*cache.iterdir()} == before
