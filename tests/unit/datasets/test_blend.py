"""Blends: the order against a plain loop, the words of the command line, and data sets built from them."""

import json
import math
import random
import re
import types

import numpy as np
import pytest
from hypothesis import given, strategies as st
from said import tells, tells_each
from token_files import WORD_PIECES, write as write_documents

from megatron.core.base.dataclass_flags import ConfigError
from megatron.core.datasets import DataConfig, blending_indices_and_dataset, build_gpt_datasets
from megatron.core.datasets.bert_dataset_builder import build_bert_datasets
from megatron.core.datasets.blending_indices_and_dataset import (
    Blend,
    BlendedDataset,
    BlendIndices,
    exhaustive_indices,
    normalized,
    parse_blend,
    samples_of_each,
    sufficient_surplus,
    weighted_indices,
)
from megatron.core.datasets.choose_masked_spans import MaskedDataConfig
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.datasets.indexed_dataset import IndexedDataset
from megatron.core.datasets.utils import Split

TOKENIZER = types.SimpleNamespace(vocab_size=1000, eod=999, pad=None)


def plain_order(shares, size, limits=None):
    """The rule as it reads: who is furthest behind gives the next sample, unless it is spent."""
    counts, chosen = [0] * len(shares), []
    for i in range(size):
        behind = [share * max(i, 1) - count for share, count in zip(shares, counts)]
        able = [d for d in range(len(shares)) if limits is None or counts[d] < limits[d]]
        best = max(able, key=lambda d: (behind[d], -d))
        chosen.append((best, counts[best]))
        counts[best] += 1
    return chosen


@pytest.mark.parametrize("count", [1, 2, 3, 12, 13, 50])
def test_the_data_set_furthest_behind_gives_the_next_sample(count):
    dice = random.Random(count)
    for weights in ([1.0] * count, [dice.random() for _ in range(count)], [dice.choice([1, 2]) for _ in range(count)]):
        shares = normalized(weights)
        indices = weighted_indices(shares, 400)
        assert list(zip(*(part.tolist() for part in indices))) == plain_order(shares, 400)
        assert [part.dtype for part in indices] == [np.int16, np.int64]


def test_lanes_that_walk_at_once_make_the_choices_of_one(monkeypatch):
    """Thousands of samples: ties, powers of ten between the weights, lanes that begin wrong, few rivals for many."""
    dice = random.Random(0)
    weights = [[dice.random() for _ in range(3)], [2.0, 1.0, 1.0], [1.0, 1e-3, 2e-4], [0.3, 0.3, 0.1, 0.1, 0.1, 0.1]]
    weights += [[dice.choice([1.0, 0.5, 1e-3, dice.random()]) for _ in range(15)]]
    walks = []
    walk = blending_indices_and_dataset._choose
    monkeypatch.setattr(
        blending_indices_and_dataset, "_choose", lambda *arguments: walks.append(arguments) or walk(*arguments)
    )
    monkeypatch.setattr(blending_indices_and_dataset, "_CANDIDATES", 8)
    monkeypatch.setattr(blending_indices_and_dataset, "_BLOCK", 7)
    for some in weights:
        shares, size = normalized(some), 100 * len(some)
        indices = weighted_indices(shares, size)
        assert list(zip(*(part.tolist() for part in indices))) == plain_order(shares, size)
    assert len(walks) > 2 * len(weights), "else no lane began wrong"


def test_an_exhaustive_blend_takes_every_sample_once():
    for sizes in ([3], [1, 5], [0, 4, 2], [20, 1, 1, 7]):
        indices = exhaustive_indices(sizes)
        pairs = list(zip(*(part.tolist() for part in indices)))
        assert pairs == plain_order([size / sum(sizes) for size in sizes], sum(sizes), sizes)
        assert sorted(pairs) == [(d, k) for d, size in enumerate(sizes) for k in range(size)]


WORDS_AND_BLENDS = [
    ("a", Blend(("a",))),
    ("1 a", Blend(("a",), (1.0,))),
    ("a b", Blend(("a", "b"))),
    ("a b c", Blend(("a", "b", "c"))),
    ("0.3 a 0.7 b", Blend(("a", "b"), (0.3, 0.7))),
    ("1 2", Blend(("2",), (1.0,))),
    ("1 a x b", Blend(("1", "a", "x", "b"))),
]


@pytest.mark.parametrize(("words", "blend"), WORDS_AND_BLENDS)
def test_words_are_weights_and_prefixes_or_prefixes_alone(words, blend):
    assert parse_blend(words.split()) == blend


def test_bad_weights_and_missing_files_are_named(tmp_path):
    for weight in ("0", "-1", "nan", "inf"):
        with pytest.raises(ConfigError, match="--data-path"):
            DataConfig(data_path=["0.3", "a", weight, "b"])
    for weights in (("1e-300", "1e300"), ("1e308", "1e308")):
        with pytest.raises(ConfigError, match="--data-path"):
            DataConfig(data_path=[weights[0], "a", weights[1], "b"])
    assert DataConfig(data_path=["5e-324", "a", "1e-12", "b"]).blends()[0].weights[0] > 0
    problems = DataConfig(data_path=["0.3", f"{tmp_path}/a", "b"]).missing_files()
    assert len(problems) == 3
    assert tells(problems[0], "--data-path 0.3 0.3.idx")
    assert tells(problems[0], "0.3 0.7")
    (tmp_path / "books_text_document.idx").touch()
    (problem,) = DataConfig(data_path=[f"{tmp_path}/books"]).missing_files()
    assert tells(problem, f"--data-path {tmp_path}/books {tmp_path}/books.idx")
    assert tells(problem, f"{tmp_path}/books_text_document")


def test_samples_of_each_are_rounded_up_twice():
    assert samples_of_each(100, [0.301, 0.699]) == [31, 70]
    assert samples_of_each(100, [0.301, 0.699], 0.005) == [32, 71]


def write(prefix, token, documents=30, length=20):
    return write_documents(prefix, [[[token] * length]] * documents)


@pytest.fixture
def files(tmp_path):
    return [write(tmp_path / name, token) for token, name in enumerate("abc", start=1)]


def build(tmp_path, sizes=(100, 20, 20), **settings):
    config = DataConfig(seq_length=8, data_cache_path=str(tmp_path / "cache"), **settings)
    return build_gpt_datasets(config, TOKENIZER, list(sizes), 1)


def test_a_blend_holds_each_data_set_by_its_weight(files, tmp_path):
    a, b, c = files
    train, valid, _ = build(tmp_path, data_path=["0.5", a, "3", b, "1.5", c], split="8,1,1")
    tokens = [int(train[i]["tokens"][0]) for i in range(len(train))]
    assert len(train) == 10 + 60 + 30
    assert [tokens.count(token) for token in (1, 2, 3)] == [10, 60, 30]
    assert isinstance(valid, BlendedDataset)
    with pytest.raises(IndexError, match="sample 100 of 100"):
        train[100]


def test_each_split_may_have_data_of_its_own(files, tmp_path):
    a, b, c = files
    train, valid, test = build(tmp_path, train_data_path=["1", a, "1", b], valid_data_path=[c])
    assert {int(train[i]["tokens"][0]) for i in range(len(train))} == {1, 2}
    assert {int(valid[i]["tokens"][0]) for i in range(len(valid))} == {3}
    assert test is None


def test_lists_of_data_may_lie_in_files(files, tmp_path):
    a, b, c = files
    (tmp_path / "list").write_text(f"0.3 {a}\n0.7 {b}\n")
    assert DataConfig(data_args_path=str(tmp_path / "list")).blends()[0] == Blend((a, b), (0.3, 0.7))
    commented = f"\ufeff# the blend: 1 x\n0.3 {a} # books\n\n  #0.5 {c}\n0.7 {b}\n#"
    (tmp_path / "list").write_text(commented, encoding="utf-8")
    assert DataConfig(data_args_path=str(tmp_path / "list")).blends()[0] == Blend((a, b), (0.3, 0.7))
    (tmp_path / "list").write_text("a#1 b")
    assert DataConfig(data_args_path=str(tmp_path / "list")).blends()[0] == Blend(("a#1", "b"))
    (tmp_path / "lists").write_text(json.dumps({"train": [a, b], "valid": [c]}))
    own = DataConfig(per_split_data_args_path=str(tmp_path / "lists"))
    assert own.blends() == (Blend((a, b)), Blend((c,)), None)
    assert own.source_problems() == own.missing_files() == []
    (tmp_path / "lists").write_text('{"training": []}')
    assert tells(own.source_problems()[0], "train valid test")
    assert tells(DataConfig(data_args_path=str(tmp_path / "none")).source_problems()[0], f"{tmp_path}/none")


def test_a_list_without_weights_gives_each_data_set_once(files, tmp_path):
    train, _, _ = build(tmp_path, (None, 0, 0), data_path=files, split="1")
    assert len(train) == sum(len(dataset) for dataset in train.datasets) == 3 * ((30 * 20 - 1) // 8)
    with pytest.raises(ValueError, match="weights"):
        build(tmp_path, (None, 0, 0), data_path=["1", files[0]], split="1")


def test_a_blend_is_built_once_and_read_from_its_cache(files, tmp_path):
    settings = {"data_path": ["1", files[0], "2", files[1]], "split": "1"}
    first, _, _ = build(tmp_path, (50, 0, 0), **settings)
    names = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "cache").iterdir()}
    assert sum("BlendedDataset-train-dataset_index" in name for name in names) == 1
    again, _, _ = build(tmp_path, (50, 0, 0), **settings)
    assert {path.name: path.stat().st_mtime_ns for path in (tmp_path / "cache").iterdir()} == names
    assert np.array_equal(first.indices.dataset_index, again.indices.dataset_index)
    build(tmp_path, (50, 0, 0), data_path=["1", files[0], "3", files[1]], split="1")
    names = [path.name for path in (tmp_path / "cache").iterdir()]
    assert sum("BlendedDataset-train-dataset_index" in name for name in names) == 2


def test_a_data_set_without_enough_samples_or_documents_is_named(files, tmp_path):
    indices = BlendIndices(np.zeros(5, np.int16), np.arange(5))
    with pytest.raises(ValueError, match=r"(?s)5.*3.*--mid-level-dataset-surplus"):
        BlendedDataset([range(3)], indices, ["a"])
    small = write(tmp_path / "small", 5, documents=3)
    with pytest.raises(ValueError, match=r"(?s)--split.*98,1,1.*3"):
        build(tmp_path, data_path=["1", files[0], "1", small], split="98,1,1")


@pytest.mark.parametrize(
    ("weights", "length", "told"),
    [
        (None, 1, "valid split: the split (sequences 96 to 98) has 2 tokens"),
        (["1", "2", "1"], 0, "train split: the split (sequences 0 to 96) has 0 tokens"),
    ],
)
def test_a_split_with_too_few_tokens_is_named_with_its_file(weights, length, told, tmp_path):
    """Three data sets, of which 2 % of 100 documents are for validation; with weights only empty ones are too few."""
    prefixes = [write(tmp_path / name, 1, documents=100, length=20) for name in ("first", "last")]
    prefixes.insert(1, write(tmp_path / "short", 7, documents=100, length=length))
    words = prefixes
    if weights is not None:
        words = [word for pair in zip(weights, prefixes) for word in pair]
    with pytest.raises(ValueError) as error:
        build(tmp_path, (100, 20, 20), data_path=words, split="96,2,2")
    assert str(error.value).startswith(f"{tmp_path}/short, {told}")


def test_each_kind_of_samples_names_the_file_and_the_split(tmp_path):
    """One epoch of a split whose tokens do not fill a sample; sentences of which none begins a pair; Megatron's own call."""
    few = write(tmp_path / "few", 7, documents=100, length=1)
    with pytest.raises(ValueError, match=rf"{few}, valid split: the split \(sequences 96 to 98\) has 2 tokens"):
        build(tmp_path, (100, None, 20), data_path=[few], split="96,2,2")
    config = DataConfig(seq_length=64, data_path=[few], split="96,2,2", data_cache_path=str(tmp_path / "cache"))
    with pytest.raises(ValueError, match=rf"{few}, train split: none of 96 documents gives a sample"):
        build_bert_datasets(config, MaskedDataConfig(), WORD_PIECES, [10, 2, 2], 1)
    mcore = GPTDatasetConfig(
        random_seed=1, sequence_length=64, blend=([few], None), split="96,2,2", tokenizer=TOKENIZER
    )
    indexed = IndexedDataset(few)
    with pytest.raises(ValueError, match=rf"{few}, valid split: the split \(sequences 0 to 3\)"):
        GPTDataset(indexed, few, np.arange(3), None, Split.valid, mcore)


@pytest.mark.parametrize("datasets", [5, 12])
@pytest.mark.parametrize("samples", [8, 16])
def test_the_surplus_that_would_do_is_said_and_does(datasets, samples, tmp_path):
    """Small weights and few validation samples: the order takes more of a data set than its rounded share."""
    words = ["100", write(tmp_path / "large", 1, documents=1, length=9)]  # one sample in each epoch
    for number in range(1, datasets):
        words += [str(0.01 * number), write(tmp_path / str(number), number, documents=1, length=9)]
    settings = {"train_data_path": [words[1]], "valid_data_path": words}
    with pytest.raises(ValueError) as error:
        build(tmp_path, (1, samples, 0), **settings)
    told = re.search(
        r"\(valid split\), which has \d+: --mid-level-dataset-surplus ([\d.]+) is enough", str(error.value)
    )
    _, valid, _ = build(tmp_path, (1, samples, 0), **settings, mid_level_dataset_surplus=float(told[1]))
    assert len(valid) >= samples


@given(st.lists(st.integers(1, 50), min_size=1, max_size=9), st.lists(st.integers(0, 500), min_size=9, max_size=9))
def test_the_surplus_is_enough_and_not_much_more(requested, taken):
    taken = taken[: len(requested)]
    surplus = sufficient_surplus(taken, requested)

    def asked(more: float) -> list[int]:
        return [math.ceil(base * (1 + more)) for base in requested]

    assert all(count <= base for count, base in zip(taken, asked(surplus)))
    assert surplus == 0 or any(count > base for count, base in zip(taken, asked(surplus - 0.002)))


SETTINGS_AND_REASONS = [
    ({"train_data_path": ["a"], "split": "1"}, "--split 1 has no effect if each split has data of its own"),
    ({"data_path": []}, "--data-path: nothing is given; name a prefix"),
]


@pytest.mark.parametrize(("settings", "reason"), SETTINGS_AND_REASONS)
def test_settings_that_contradict_each_other_are_refused(settings, reason):
    with pytest.raises(ConfigError, match=reason):
        DataConfig(**settings)


def test_data_come_from_one_place():
    for other in ({"train_data_path": ["b"]}, {"mock_data": True}, {"data_args_path": "c"}):
        (problem,) = DataConfig(data_path=["a"], **other).source_problems()
        assert tells(problem, " ".join(["--data-path", *("--" + name.replace("_", "-") for name in other)]))


def test_validation_data_alone_are_not_enough():
    assert tells_each(DataConfig(valid_data_path=["a"]).source_problems(), "--train-data-path")
