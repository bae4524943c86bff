"""GPT samples, their index cache, mock data, and batches."""

import errno
import os
import random
import socket
import types
from dataclasses import replace

import numpy as np
import pytest
import torch
from said import tells
from token_files import write

from megatron.core.base.dataclass_flags import ConfigError
from megatron.core.datasets import DataConfig, GPTDataset, IndexedDataset, MockGPTDataset, build_gpt_datasets
from megatron.core.datasets.data_parallel_sampler_and_loader import batches, micro_batch_ids
from megatron.core.datasets.gpt_dataset_and_builder import TokenRules, training_item
from megatron.core.datasets.index_cache import content_fingerprint
from megatron.core.datasets.index_map import IndexRequest, build_indices

EOD, VOCAB, S = 99, 100, 16
TOKENIZER = types.SimpleNamespace(vocab_size=VOCAB, eod=EOD, pad=None)


def write_documents(prefix, count=60, seed=0, ids=range(98)):
    """Documents of 0 to 39 random tokens and eod; every tenth is empty. Returns them as lists."""
    dice = random.Random(seed)
    documents = [
        [] if d % 10 == 9 else [dice.choice(ids) for _ in range(dice.randrange(40))] + [EOD] for d in range(count)
    ]
    write(prefix, [[document] for document in documents])
    return documents


@pytest.fixture
def data(tmp_path):
    documents = write_documents(tmp_path / "text")
    return types.SimpleNamespace(prefix=str(tmp_path / "text"), documents=documents, cache=tmp_path / "cache")


def config_of(data, **changes):
    return DataConfig(data_path=[data.prefix], seq_length=S, data_cache_path=str(data.cache), **changes)


def build(data, num_samples=(40, 10, 10), seed=1234, **changes):
    return build_gpt_datasets(config_of(data, split="8,1,1", **changes), TOKENIZER, list(num_samples), seed)


def test_samples_are_the_documents_laid_end_to_end(data):
    for n in (None, 5, 40, 150, 400):
        train, _, _ = build(data, (n, 0, 0))
        indices = build_indices(train.indexed.sequence_lengths, IndexRequest((0, 48), n, S, 1234))
        stream = [token for d in indices.document_index for token in data.documents[d]]
        assert len(train) == (len(stream) - 1) // S
        for i, k in enumerate(indices.shuffle_index.tolist()):
            item = train[i]
            assert item["tokens"].tolist() == stream[k * S : k * S + S]
            assert item["labels"].tolist() == stream[k * S + 1 : k * S + S + 1]


def test_items_have_the_promised_arrays(data):
    item = build(data)[0][0]
    assert {key: (str(value.dtype), value.shape) for key, value in item.items()} == dict(
        tokens=("int64", (S,)), labels=("int64", (S,)), loss_mask=("float32", (S,)), position_ids=("int64", (S,))
    )
    assert item["position_ids"].tolist() == list(range(S))


def test_a_last_partial_sample_is_padded_and_not_trained_on(data):
    indexed = IndexedDataset(data.prefix)
    indices = build_indices(indexed.sequence_lengths, IndexRequest((0, 1), None, S, 1, drop_last=False))
    text = data.documents[0]
    fresh = (len(text) - 1) % S
    assert fresh, "the seed gives a document that does not end with a sample"
    dataset = GPTDataset(indexed, indices, S, TokenRules(VOCAB, EOD))
    item = dataset[int(np.argmax(indices.shuffle_index))]
    assert item["tokens"].tolist() == text[-fresh - 1 :] + [0] * (S - fresh - 1)
    assert item["labels"].tolist() == text[-fresh:] + [0] * (S - fresh)
    assert item["loss_mask"].tolist() == [1.0] * fresh + [0.0] * (S - fresh)


RULES_AND_MASKS = [
    (TokenRules(9, eod_id=8), [3, 8, 4], [8, 4, 7], [1, 1, 1]),
    (TokenRules(9, eod_id=8, eod_mask_loss=True), [3, 8, 4], [8, 4, 7], [1, 0, 1]),
    (TokenRules(9, eod_id=8, pad_id=7), [3, 8, 4], [8, 4, 0], [1, 1, 0]),
    (TokenRules(9, eod_id=8, pad_id=8), [3, 8, 4], [8, 4, 7], [1, 1, 1]),
    (TokenRules(9, eod_id=8, pad_id=4, pad_is_text=True), [3, 8, 4], [8, 4, 7], [1, 1, 1]),
]


@pytest.mark.parametrize(("rules", "tokens", "labels", "mask"), RULES_AND_MASKS)
def test_loss_mask_follows_the_rules(rules, tokens, labels, mask):
    item = training_item(np.array([3, 8, 4, 7]), rules)
    assert [item[key].tolist() for key in ("tokens", "labels", "loss_mask")] == [tokens, labels, mask]


def test_eod_mask_loss_reaches_the_samples(data):
    plain, masked = build(data)[0], build(data, eod_mask_loss=True)[0]
    for i in range(len(plain)):
        assert plain[i]["loss_mask"].all()
        assert (masked[i]["loss_mask"] == (masked[i]["tokens"] != EOD)).all()


TOKENS_AND_DOCUMENTS = [
    ([1, 2, 8, 3, 4, 5], [0, 1, 2, 0, 1, 2], [0, 0, 0, 1, 1, 1]),
    ([8, 8, 3, 8, 1, 8], [0, 0, 0, 1, 0, 1], [0, 1, 2, 2, 3, 3]),  # a document of its end alone
    ([1, 2, 3, 4, 5, 6], [0, 1, 2, 3, 4, 5], [0, 0, 0, 0, 0, 0]),
]


@pytest.mark.parametrize(("tokens", "positions", "documents"), TOKENS_AND_DOCUMENTS)
def test_a_document_ends_with_its_eod_token(tokens, positions, documents):
    text = np.array([*tokens, 7])
    plain = training_item(text, TokenRules(9, eod_id=8))
    assert plain["position_ids"].tolist() == list(range(6))
    assert "document_ids" not in plain
    item = training_item(text, TokenRules(9, eod_id=8, reset_position_ids=True, reset_attention_mask=True))
    assert item["position_ids"].tolist() == positions
    assert item["document_ids"].tolist() == documents
    assert all(np.array_equal(item[key], plain[key]) for key in ("tokens", "labels", "loss_mask"))


@pytest.mark.parametrize("ends", [True, False])
def test_documents_are_masked_by_the_files_with_or_without_tokens_that_end_them(tmp_path, ends):
    """The lengths are those of the documents that lie end to end, as Megatron core 0.19 counts them for its cu_seqlens."""
    dice = random.Random(1)
    documents = [[dice.choice(range(98)) for _ in range(dice.randrange(1, 12))] + [EOD] * ends for _ in range(60)]
    write(tmp_path / "text", [[document] for document in documents])
    data = types.SimpleNamespace(prefix=str(tmp_path / "text"), cache=tmp_path / "cache")
    config = config_of(data, split="1,0,0", dataloader_inter_document_masking=True)
    train, _, _ = build_gpt_datasets(config, TOKENIZER, [20, 0, 0], 1234)
    order = build_indices(train.indexed.sequence_lengths, IndexRequest((0, 60), 20, S, 1234)).document_index
    number = [place for place, d in enumerate(order) for _ in documents[d]]  # of each token's document in the stream
    within = [at for d in order for at in range(len(documents[d]))]
    for i, k in enumerate(train.indices.shuffle_index.tolist()):
        numbers = number[k * S : k * S + S]
        item = train[i]
        assert item["document_ids"].tolist() == [one - numbers[0] for one in numbers]
        starts = [at == 0 or numbers[at] != numbers[at - 1] for at in range(S)]
        first = max(0, next((at for at in range(1, S) if starts[at]), S))
        assert item["position_ids"].tolist() == [*range(first), *within[k * S + first : k * S + S]]
        assert item["loss_mask"].all()


def test_splits_share_no_document(data):
    for dataset, ids in zip(build(data), (range(48), range(48, 54), range(54, 60))):
        assert set(dataset.indices.document_index.tolist()) == set(ids)


def test_splits_without_share_samples_or_documents_are_none(data):
    datasets = build_gpt_datasets(config_of(data, split="1,0,1"), TOKENIZER, [5, 5, 0], 1)
    assert [dataset is None for dataset in datasets] == [False, True, True]
    with pytest.warns(UserWarning, match=r"(?s)--split.*1000,1,0.*60"):
        _, valid, _ = build_gpt_datasets(config_of(data, split="1000,1,0"), TOKENIZER, [5, 5, 0], 1)
    assert valid is None


def test_the_same_request_reads_the_cache_and_any_other_does_not(data):
    build(data)
    first = {path.name: path.stat().st_mtime_ns for path in data.cache.iterdir()}
    assert len(first) == 3 * 4
    build(data)
    assert {path.name: path.stat().st_mtime_ns for path in data.cache.iterdir()} == first
    files = len(first)
    others = [{"seed": 5}, {"num_samples": (41, 11, 11)}]
    for other in others:
        build(data, **other)
        assert len(list(data.cache.iterdir())) == files + 12
        files += 12
    write_documents(data.prefix, seed=1)  # other data under the same name
    build(data)
    assert len(list(data.cache.iterdir())) == files + 12


def test_data_keep_their_cache_when_they_move(data, tmp_path):
    train = build(data)[0]
    os.mkdir(tmp_path / "moved")
    for ending in (".bin", ".idx"):
        os.rename(data.prefix + ending, tmp_path / "moved" / f"x{ending}")
    data.prefix = str(tmp_path / "moved" / "x")
    files = len(list(data.cache.iterdir()))
    assert np.array_equal(build(data)[0].indices.sample_index, train.indices.sample_index)
    assert len(list(data.cache.iterdir())) == files


def test_the_cache_lies_beside_the_data_by_default(data):
    build_gpt_datasets(DataConfig(data_path=[data.prefix], seq_length=S, split="1"), TOKENIZER, [5, 0, 0], 1)
    names = sorted(os.listdir(f"{data.prefix}/cache/GPTDataset_indices"))
    stem = names[0].removesuffix("-GPTDataset-train-description.txt")
    parts = ["description.txt", "document_index.npy", "sample_index.npy", "shuffle_index.npy"]
    assert names == [f"{stem}-GPTDataset-train-{part}" for part in parts]


def flip_a_bit(path):
    content = bytearray(path.read_bytes())
    content[-8] ^= 1
    path.write_bytes(content)


def object_array(path):
    np.save(path, np.array([{}], object), allow_pickle=True)


def shorten(path):
    path.write_bytes(path.read_bytes()[:-4])


CACHE_DAMAGE = {
    "truncated": ("sample_index.npy", shorten),
    "one bit": ("sample_index.npy", flip_a_bit),
    "emptied": ("shuffle_index.npy", lambda path: path.write_bytes(b"")),
    "no array": ("document_index.npy", lambda path: path.write_bytes(b"something else entirely")),
    "pickled": ("document_index.npy", object_array),
    "removed": ("shuffle_index.npy", lambda path: path.unlink()),
    "floats": ("shuffle_index.npy", lambda path: np.save(path, np.zeros(3))),
    "description": ("description.txt", lambda path: path.write_text("{}")),
}


@pytest.mark.full
@pytest.mark.parametrize("kind", CACHE_DAMAGE)
def test_a_damaged_cache_is_built_again_with_a_warning(data, kind):
    part, damage = CACHE_DAMAGE[kind]
    before = [build(data)[0][i] for i in range(40)]
    damage(next(data.cache.glob(f"*train-{part}")))
    with pytest.warns(UserWarning, match=r"train.*damaged"):
        train = build(data)[0]
    assert all(np.array_equal(train[i]["tokens"], before[i]["tokens"]) for i in range(40))


@pytest.mark.parametrize("kind", ["truncated", "emptied", "no array", "pickled"])
def test_damage_after_the_wait_is_refused_by_name(data, kind):
    part, damage = CACHE_DAMAGE[kind]
    build(data)
    damage(next(data.cache.glob(f"*train-{part}")))
    arguments = (config_of(data, split="8,1,1"), TOKENIZER, [40, 10, 10], 1234)
    with pytest.raises(ValueError, match=f"train-{part}"):
        build_gpt_datasets(*arguments, is_builder=False)


def test_a_cache_of_other_data_is_refused_by_name(data, tmp_path):
    """Put there after the builder has looked: a process that builds nothing still sees that the sizes are not its own."""
    build(data)
    other = types.SimpleNamespace(prefix=str(tmp_path / "other"), cache=tmp_path / "other_cache")
    write_documents(other.prefix, count=80)
    build(other)
    for part in ("document_index", "sample_index", "shuffle_index"):
        mine = next(data.cache.glob(f"*train-{part}.npy"))
        before = mine.read_bytes()
        mine.write_bytes(next(other.cache.glob(f"*train-{part}.npy")).read_bytes())
        with pytest.raises(ValueError, match=rf"(?s){data.prefix}.*{part}"):
            build_gpt_datasets(config_of(data, split="8,1,1"), TOKENIZER, [40, 10, 10], 1234, is_builder=False)
        mine.write_bytes(before)


def test_a_copied_cache_is_taken_as_it_is(data):
    build(data)
    for path in data.cache.iterdir():
        os.utime(path, ns=(1, 1))
    build(data)
    assert {path.stat().st_mtime_ns for path in data.cache.iterdir()} == {1}


def test_an_interrupted_build_is_built_again(data):
    build(data)
    next(data.cache.glob("*train-description.txt")).unlink()
    next(data.cache.glob("*train-sample_index.npy")).unlink()
    assert len(build(data)[0]) >= 40


def test_others_wait_for_the_builder_and_build_nothing(data):
    calls = []
    arguments = (config_of(data, split="1"), TOKENIZER, [40, 0, 0], 1)

    def builder_works_meanwhile():
        calls.append("wait")
        assert not data.cache.exists()
        build_gpt_datasets(*arguments, is_builder=True, wait=lambda: None)

    train, _, _ = build_gpt_datasets(*arguments, is_builder=False, wait=builder_works_meanwhile)
    assert calls == ["wait"]
    assert isinstance(train.indices.sample_index, np.memmap)


def test_a_builder_that_fails_still_reaches_the_others(data):
    data.cache.write_text("a file, not a folder")
    calls = []
    arguments = (config_of(data, split="1"), TOKENIZER, [40, 0, 0], 1)
    with pytest.raises(ValueError, match="--data-cache-path"):
        build_gpt_datasets(*arguments, is_builder=True, wait=lambda: calls.append("builder"))
    with pytest.raises(ValueError, match="--data-cache-path"):
        build_gpt_datasets(*arguments, is_builder=False, wait=lambda: calls.append("other"))
    assert calls == ["builder", "other"]


def test_a_large_index_is_told_apart_by_its_blocks(data, monkeypatch):
    monkeypatch.setattr("megatron.core.datasets.index_cache._FINGERPRINT_BYTES", 256)
    monkeypatch.setattr("megatron.core.datasets.index_cache._FINGERPRINT_BLOCK", 64)
    first = content_fingerprint(IndexedDataset(data.prefix))
    assert content_fingerprint(IndexedDataset(data.prefix)) == first
    write_documents(data.prefix, seed=1)
    assert content_fingerprint(IndexedDataset(data.prefix))["idx"] != first["idx"]


def test_settings_that_cannot_work_say_what_to_change(data):
    def refused(reason, num_samples=(5, 0, 0), tokenizer=TOKENIZER, **config):
        with pytest.raises(ValueError, match=reason):
            datasets = build_gpt_datasets(DataConfig(**config), tokenizer, list(num_samples), 1)
            for i in range(len(datasets[0])):
                datasets[0][i]

    files = {"data_path": [data.prefix], "data_cache_path": str(data.cache)}
    refused("set --seq-length", **files)
    assert (
        build_gpt_datasets(DataConfig(seq_length=S, **files), TOKENIZER, [0, 1, 1], 1)[0] is None
    )  # as for --skip-train
    refused("set --data-path PREFIX, or --mock-data", seq_length=S)
    refused("so one epoch cannot be requested", (None, 0, 0), seq_length=S, mock_data=True)
    refused("leaves no document of 60 to the train split", seq_length=S, split="1,1000", **files)
    refused("smaller --seq-length", (None, 0, 0), seq_length=10_000, **files)
    small = types.SimpleNamespace(vocab_size=50, eod=49)
    refused(
        r"contains token \d+ \(sequence \d+, offset \d+\), but the tokenizer's vocabulary has 50",
        tokenizer=small,
        seq_length=S,
        **files,
    )
    train, _, _ = build(data)
    for i in (-1, len(train)):
        with pytest.raises(IndexError, match=f"sample {i} of {len(train)}"):
            train[i]


def test_too_few_tokens_for_one_sample_warns_that_they_repeat(data):
    config = DataConfig(data_path=[data.prefix], seq_length=5000, data_cache_path=str(data.cache), split="1")
    with pytest.warns(UserWarning, match="5001"):
        train, _, _ = build_gpt_datasets(config, TOKENIZER, [2, 0, 0], 1)
    assert len(train) >= 2
    assert len(train[1]["tokens"]) == 5000


def test_config_problems_are_collected():
    with pytest.raises(ConfigError) as caught:
        DataConfig(data_path=["0.5", "a", "-1", "b"], seq_length=0, mid_level_dataset_surplus=-1.0)
    assert [problem.split()[0] for problem in caught.value.problems] == [
        "--seq-length",
        "--mid-level-dataset-surplus",
        "--data-path:",
    ]


def test_unset_splits_have_the_customary_shares():
    assert DataConfig().split_shares == "969,30,1"
    assert DataConfig(mock_data=True).split_shares == DataConfig(mock_data=True, split="98,2,0").split_shares == "1,1,1"
    assert DataConfig(split="7,3").split_shares == "7,3"


def mock(num_samples=(50, 20, 0), vocab=1000, seed=1, **changes):
    tokenizer = types.SimpleNamespace(vocab_size=vocab, eod=vocab - 1)
    return build_gpt_datasets(DataConfig(mock_data=True, seq_length=32, **changes), tokenizer, list(num_samples), seed)


@pytest.mark.parametrize("stable", [False, True])
def test_a_longer_run_validates_on_the_same_samples(data, stable):
    """A run of another length asks for another number of them; within one pass over the validation data none moves, and with
    --epoch-stable-order none ever does."""
    one_pass = len(build(data, (5, 1, 0))[1])
    sizes = [1, one_pass // 2, one_pass] + [one_pass + 1, 3 * one_pass] * stable
    sets = [build(data, (5, size, 0), epoch_stable_order=stable)[1] for size in sizes]
    for longer in sets[1:]:
        assert all(np.array_equal(longer[i]["tokens"], sets[0][i]["tokens"]) for i in range(one_pass - 1))


def test_mock_samples_depend_on_seed_split_and_number_alone():
    train, valid, test = mock()
    assert test is None
    assert (len(train), len(valid)) == (50, 20)
    assert isinstance(train, MockGPTDataset)
    assert np.array_equal(train[7]["tokens"], mock((500, 1, 1))[0][7]["tokens"])
    others = [train[8], valid[7], mock(seed=2)[0][7]]
    assert not any(np.array_equal(train[7]["tokens"], other["tokens"]) for other in others)
    with pytest.raises(IndexError, match="sample 50 of 50"):
        train[50]


@pytest.mark.full
@pytest.mark.parametrize("vocab", [2, 5, 1000, 50257])
def test_mock_samples_are_noisy_progressions_over_the_vocabulary(vocab):
    train, _, _ = mock((100, 0, 0), vocab)
    distinct = min(vocab, 256)
    alphabet = [value * vocab // distinct for value in range(distinct)]
    texts = np.stack([np.append(train[i]["tokens"], train[i]["labels"][-1:]) for i in range(100)])
    assert np.unique(texts).tolist() == alphabet
    steps = np.diff(np.searchsorted(alphabet, texts), axis=1) % distinct
    usual = np.array([np.bincount(row).argmax() for row in steps])[:, None]
    assert (steps == usual).mean() > 0.85  # noise of 5% spoils about 10% of the steps


ARGUMENTS_AND_IDS = [
    ((9, 1, 2, 1, 2), [[3, 4], [7, 8]]),
    ((9, 1, 2, 0, 2), [[1, 2], [5, 6]]),
    ((8, 0, 3, 0, 1), [[0, 1, 2], [3, 4, 5]]),  # the short tail is dropped
    ((8, 0, 4, 1, 2), [[4, 5, 6, 7]]),
    ((7, 0, 4, 1, 2), []),
    ((8, 20, 1, 0, 1), []),
]


@pytest.mark.parametrize(("arguments", "ids"), ARGUMENTS_AND_IDS)
def test_micro_batch_ids(arguments, ids):
    assert [list(some) for some in micro_batch_ids(*arguments)] == ids


@pytest.mark.parametrize(("size", "micro"), [(1, 1), (1, 4), (2, 1), (2, 2), (3, 2), (4, 3), (12, 1)])
def test_an_iteration_reads_the_same_samples_in_every_layout(size, micro):
    global_batch, total = 12, 100
    per_iteration = global_batch // (size * micro)
    ranks = [list(micro_batch_ids(total, 24, micro, rank, size)) for rank in range(size)]
    for iteration in range(total // global_batch - 2):
        mine = slice(iteration * per_iteration, (iteration + 1) * per_iteration)
        samples = sorted(i for rank in ranks for ids in rank[mine] for i in ids)
        assert samples == list(range(24 + iteration * global_batch, 24 + (iteration + 1) * global_batch))


def test_batches_are_stacked_samples_and_leave_global_generators_alone():
    train, _, _ = mock()
    before = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()
    stream = batches(train, 8, 3, 1, 2)
    batch = next(stream)
    assert {key: (value.dtype, value.shape) for key, value in batch.items()} == {
        "tokens": (torch.int64, (3, 32)),
        "labels": (torch.int64, (3, 32)),
        "loss_mask": (torch.float32, (3, 32)),
        "position_ids": (torch.int64, (3, 32)),
    }
    for row, i in enumerate((11, 12, 13)):
        assert batch["tokens"][row].tolist() == train[i]["tokens"].tolist()
    assert len(list(stream)) == (50 - 8) // 6 - 1
    with pytest.raises(StopIteration):
        next(stream)
    assert torch.equal(before[0], torch.get_rng_state())
    assert before[1:] == (np.random.get_state()[1].tolist(), random.getstate())


@pytest.mark.parametrize("arguments", [(9, 0, 0, 0, 1), (9, 0, 1, 1, 1), (9, 0, 1, -1, 2), (9, -1, 1, 0, 1)])
def test_impossible_batches_are_refused(arguments):
    with pytest.raises(ValueError, match=r"(?s)micro_batch_size.*1.*data_parallel_rank"):
        next(micro_batch_ids(*arguments))


# ---------------------------------------------------------------- data that are not the tokenizer's


@pytest.mark.parametrize(
    "token, message",
    [(-1, "and no id is negative"), (-7, "and no id is negative"), (100, "has 100 (Forks forks.json)")],
)
def test_an_id_that_no_vocabulary_has_is_refused_by_its_place(token: int, message: str, tmp_path):
    """-1 too, which stands for padding within a sample."""
    write(tmp_path / "text", [[list(range(40))]] * 6 + [[[1] * 25 + [token] + [1] * 14]], np.int32)
    config = DataConfig(data_path=[str(tmp_path / "text")], seq_length=S, split="1", data_cache_path=str(tmp_path))
    tokenizer = types.SimpleNamespace(**vars(TOKENIZER), name="Forks", path="forks.json")
    train, _, _ = build_gpt_datasets(config, tokenizer, [None, 0, 0], 1)
    refused = []
    for i in range(len(train)):
        try:
            train[i]
        except ValueError as error:
            refused.append(str(error))
    assert refused, "no sample holds the id"
    for text in refused:
        assert tells(text, f"text.bin {token} 6 25") and message in text


def test_what_is_strange_is_said_once_to_who_asks(data, recwarn):
    said: list[str] = []
    config = config_of(data, split="1000,1,0")
    large = types.SimpleNamespace(vocab_size=70_000, eod=EOD)
    build_gpt_datasets(config, large, [4, 4, 0], 1, say=said.append)
    assert len(said) == 2 and not recwarn.list
    assert tells(said[0], "65535 uint16 70000")
    assert tells(said[1], "60 valid")


@pytest.mark.parametrize(
    "given, meant", [("te", None), ("text", "text_text_document"), ("text_text_document.bin", "text_text_document")]
)
def test_a_prefix_that_is_nearly_right_is_answered_with_the_right_one(given: str, meant: str | None, tmp_path):
    write_documents(tmp_path / "text_text_document")
    with pytest.raises(FileNotFoundError) as refused:
        IndexedDataset(tmp_path / given)
    hint = str(refused.value).partition("did you mean ")[2]
    assert hint == (f"{tmp_path / meant}?" if meant else "")


def test_files_that_the_system_does_not_map_are_named_with_the_reason(data, monkeypatch):
    """As in a blend of so many data sets that the process has no maps left."""
    build(data)

    def refused(*_, **__):
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    with monkeypatch.context() as patched:
        patched.setattr(np.lib.format, "open_memmap", refused)
        with pytest.raises(ValueError, match=r"(?s)document_index.npy.*vm.max_map_count"):
            build(data)
    monkeypatch.setattr(np, "memmap", refused)
    with pytest.raises(ValueError, match=r"text.idx"):
        build(data)


@pytest.mark.full
def test_a_build_removes_what_a_killed_one_left(data):
    left = data.cache / f"ab-GPTDataset-train-x.npy.{socket.gethostname().split('.')[0]}-1-ab.tmp"
    data.cache.mkdir()
    left.touch()
    build(data)
    assert not left.exists() and not list(data.cache.glob("*.tmp"))


@pytest.mark.parametrize("vocab_size", [300, 50257])
@pytest.mark.parametrize("setting", ["eod_mask_loss", "reset_position_ids", "reset_attention_mask"])
def test_made_up_data_hold_ends_of_documents_where_a_setting_looks_for_them(setting, vocab_size):
    """At most 256 of the ids occur, and the end of a document need not be one of them."""
    rules = TokenRules(vocab_size, vocab_size - 1)
    plain = MockGPTDataset(4, 512, (1, 0), rules)
    with_ends = MockGPTDataset(4, 512, (1, 0), replace(rules, **{setting: True}))
    assert not any((plain[i]["tokens"] == vocab_size - 1).any() for i in range(4))
    ends = np.concatenate([with_ends[i]["tokens"] == vocab_size - 1 for i in range(4)])
    assert 1 / 512 < ends.mean() < 1 / 128
