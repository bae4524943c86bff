"""BERT's data sets as training builds them: splits, blends, the cache of sample maps, and made-up samples."""

import types

import numpy as np
import pytest
from token_files import WORD_PIECES as TOKENIZER, write_sentences

from megatron.core.base.dataclass_flags import ConfigError
from megatron.core.datasets import DataConfig
from megatron.core.datasets.bert_dataset_builder import MockBertDataset, build_bert_datasets
from megatron.core.datasets.choose_masked_spans import MaskedDataConfig

S = 16
MASKING = MaskedDataConfig()


def write(prefix, documents=60, sentences=(2, 9), word=None):
    """Documents of random sentences, or of one `word` throughout."""
    return write_sentences(prefix, documents, sentences, word=word)


@pytest.fixture
def prefix(tmp_path):
    return write(tmp_path / "text")


def build(paths, tmp_path, num_samples=(40, 10, 10), masking=MASKING, tokenizer=TOKENIZER, **changes):
    given = {name: changes.pop(name) for name in ("is_builder", "wait", "say", "progress") if name in changes}
    defaults = {"data_path": [paths] if isinstance(paths, str) else paths, "split": "8,1,1" if paths else None}
    changes = defaults | {"data_cache_path": str(tmp_path / "c")} | changes
    config = DataConfig(seq_length=S, **changes)
    return build_bert_datasets(config, masking, tokenizer, list(num_samples), 1234, **given)


def cached(tmp_path):
    return {path.name: path.stat().st_mtime_ns for path in (tmp_path / "c").iterdir()}


def text_of(item):
    return set(np.where(item["labels"] >= 0, item["labels"], item["text"]).tolist())


def test_splits_are_shares_of_documents(prefix, tmp_path):
    datasets = build(prefix, tmp_path, split="8,1,1")
    borders = datasets[0].indexed.document_indices[[0, 48, 54, 60]].tolist()
    for dataset, count, first, past in zip(datasets, (40, 10, 10), borders, borders[1:]):
        assert len(dataset) >= count
        assert first <= dataset.sample_map[:, 0].min() < dataset.sample_map[:, 1].max() <= past
    assert [d is None for d in build(prefix, tmp_path, (40, 0, 10), split="1,1,0")] == [False, True, True]


def test_a_map_is_built_once_and_by_the_builder_alone(prefix, tmp_path):
    said = []
    first = build(prefix, tmp_path, progress=said.append)
    files = cached(tmp_path)
    assert said == [f"building the index of {prefix} ({split}, 1 of 1)" for split in ("train", "valid", "test")]
    again = build(prefix, tmp_path, is_builder=False, progress=said.append)
    assert cached(tmp_path) == files and len(said) == 3
    assert all(np.array_equal(a.sample_map, b.sample_map) for a, b in zip(first, again))
    for other in ({"masking": MaskedDataConfig(short_seq_prob=0.5)}, {"num_samples": (90, 0, 0)}):
        before = len(cached(tmp_path))
        build(prefix, tmp_path, **other)
        assert len(cached(tmp_path)) > before
    write(prefix, documents=70)  # other data under the same name
    with pytest.raises(ValueError, match="cache"):
        build(prefix, tmp_path, is_builder=False)


def test_a_damaged_map_is_built_again(prefix, tmp_path):
    whole = build(prefix, tmp_path)[0].sample_map.copy()
    path = next((tmp_path / "c").glob("*-train-sample_index.npy"))
    path.write_bytes(path.read_bytes()[:-4])
    said = []
    assert np.array_equal(build(prefix, tmp_path, say=said.append)[0].sample_map, whole)
    assert len(said) == 1 and "damaged" in said[0]


def test_all_wait_also_after_an_error(tmp_path):
    waited = []
    alone = write(tmp_path / "alone", sentences=(1, 2))
    with pytest.raises(ValueError, match=r"(?s)48.*--split-sentences"):
        build(alone, tmp_path, wait=lambda: waited.append(1))
    assert waited == [1]
    datasets = build(alone, tmp_path, masking=MaskedDataConfig(bert_binary_head=False))
    assert len(datasets[0]) >= 40 and datasets[0][0]["types"].sum() == 0


def test_a_blend_takes_its_shares(tmp_path):
    a, b = (write(tmp_path / name, word=word) for name, word in (("a", 10), ("b", 20)))
    train, *_ = build(["0.75", a, "0.25", b], tmp_path, (40, 0, 0))
    hidden = [10 if 10 in text_of(train[i]) else 20 for i in range(len(train))]
    assert len(train) == 40 and hidden.count(10) == 30 and hidden[:4] == [10, 20, 10, 10]
    whole, *_ = build([a, b], tmp_path, (None, None, None))
    ones, *_ = build(a, tmp_path, (None, None, None))
    assert len(whole) == 2 * len(ones)  # every sample of one pass over each
    with pytest.raises(ValueError, match="weights"):
        build(["1", a, "1", b], tmp_path, (None, None, None))


def test_splits_may_have_files_of_their_own(tmp_path):
    a, b = (write(tmp_path / name, word=word) for name, word in (("a", 10), ("b", 20)))
    paths = {"train_data_path": [a], "valid_data_path": ["0.3", b]}
    train, valid, test = build(None, tmp_path, **paths)
    assert test is None and text_of(train[0]) & {10, 20} == {10} and text_of(valid[0]) & {10, 20} == {20}


def test_what_cannot_be_trained_on_is_refused_by_name(prefix, tmp_path):
    plain = types.SimpleNamespace(name="GPT2BPETokenizer", vocab_size=100, eod=99, pad=None)
    with pytest.raises(ValueError, match=r"(?s)GPT2BPETokenizer.*\[CLS\].*--tokenizer-type.*BertWordPieceLowerCase"):
        build(prefix, tmp_path, tokenizer=plain)
    small = types.SimpleNamespace(**vars(TOKENIZER) | {"vocab_size": 50})
    train, *_ = build(prefix, tmp_path, tokenizer=small)
    with pytest.raises(ConfigError, match=r"(?s)text.bin.*50.*BertWordPieceLowerCase"):
        [train[i] for i in range(len(train))]
    short = DataConfig(mock_data=True, seq_length=4, eod_mask_loss=True)
    with pytest.raises(ConfigError, match=r"(?s)--eod-mask-loss.*BERT.*--seq-length.*4.*5"):
        build_bert_datasets(short, MASKING, TOKENIZER, [0, 0, 0], 1)
    with pytest.raises(ConfigError, match=r"(?s)--mask-prob.*0.15.*--seq-length.*9.*3"):
        build_bert_datasets(DataConfig(mock_data=True, seq_length=9), MASKING, TOKENIZER, [1, 0, 0], 1)
    with pytest.raises(ConfigError, match=r"(?s)--mask-prob.*1.0.*--short-seq-prob.*-1"):
        MaskedDataConfig(mask_prob=1.0, short_seq_prob=-1)


def test_made_up_parts_rise_unless_they_were_swapped():
    plain = types.SimpleNamespace(vocab_size=1000, eod=999)
    config = DataConfig(mock_data=True, seq_length=64)
    train, valid, test = build_bert_datasets(config, MaskedDataConfig(), plain, [60, 10, 0], 7)
    assert test is None and isinstance(train, MockBertDataset)
    right = 0
    for i in range(60):
        item, again = train[i], train[i]
        assert all(np.array_equal(item[key], again[key]) for key in item)
        words = np.where(item["labels"] >= 0, item["labels"], item["text"])
        first, second = (words[(item["types"] == t) & (words > 3)].mean() for t in (0, 1))
        right += (first > second) == bool(item["is_random"])
    assert right > 50  # noise decides where a part is a word or two
    assert not np.array_equal(train[0]["text"], valid[0]["text"])
