"""Rot in the caches of index arrays: a bit that flips on the disk, while size and date stay, changes no sample."""

import os
import random

import numpy as np
import pytest
from token_files import WORD_PIECES as TOKENIZER, write_sentences

from megatron.core.datasets import DataConfig, build_gpt_datasets, index_cache as cache_module
from megatron.core.datasets.bert_dataset_builder import build_bert_datasets
from megatron.core.datasets.choose_masked_spans import MaskedDataConfig
from megatron.core.datasets.index_cache import IndexCache

S, FLIPS = 16, 40


def write(prefix):
    return write_sentences(prefix, 12, (3, 9), seed=len(prefix.name))


def gpt(config, say):
    train = build_gpt_datasets(config, TOKENIZER, [40, 0, 0], 7, say=say)[0]
    return [train[i]["tokens"].tolist() for i in range(40)]


def bert(config, say):
    train = build_bert_datasets(config, MaskedDataConfig(), TOKENIZER, [20, 0, 0], 7, say=say)[0]
    return [train[i]["text"].tolist() for i in range(20)]


def flip_a_bit(path, dice):
    """In place, as a disk does it: the size and the date stay."""
    stat = os.stat(path)
    with open(path, "r+b") as file:
        at = dice.randrange(stat.st_size)
        byte = os.pread(file.fileno(), 1, at)[0]
        os.pwrite(file.fileno(), bytes([byte ^ 1 << dice.randrange(8)]), at)
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))


@pytest.mark.parametrize("samples_of", [gpt, bert])
@pytest.mark.full
def test_a_bit_that_flips_changes_no_sample(tmp_path, samples_of):
    """In every file of the cache of a blend in turn: it is built again with a warning, and the samples are the same."""
    paths = ["0.6", write(tmp_path / "a"), "0.4", write(tmp_path / "bc")]
    config = DataConfig(data_path=paths, seq_length=S, split="1", data_cache_path=str(tmp_path / "cache"))
    said, dice = [], random.Random(5)
    right = samples_of(config, said.append)
    files = sorted((tmp_path / "cache").iterdir())
    for number in range(FLIPS):
        flip_a_bit(files[number % len(files)], dice)
        assert samples_of(config, said.append) == right, files[number % len(files)]
        assert len(said) == number + 1 and "damaged" in said[-1]
    assert samples_of(config, said.append) == right and len(said) == FLIPS


def test_every_block_of_a_large_file_is_hashed(tmp_path, monkeypatch):
    monkeypatch.setattr(cache_module, "_HASH_BLOCK", 64)
    cache, array = IndexCache(tmp_path, "GPTDataset", "train", {}, ("some",)), np.arange(500)
    cache.write((array,))
    assert cache.is_complete(pytest.fail)
    path, said = cache.path("some.npy"), []
    whole = path.read_bytes()
    for at in (0, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        assert not cache.is_complete(said.append)
    path.write_bytes(whole + b"\0")
    assert not cache.is_complete(said.append)
    path.write_bytes(whole)
    assert cache.is_complete(pytest.fail) and len(said) == 4
