"""Megatron's index caches: found by their descriptions, taken if every number fits, else built anew. The order of samples is the same."""

import types
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from said import tells
from token_files import write
from written_caches import write_cache

from megatron.core.datasets import DataConfig, IndexedDataset, build_gpt_datasets
from megatron.core.datasets.blending_indices_and_dataset import exhaustive_indices, weighted_indices
from megatron.core.datasets.index_map import IndexRequest, build_indices
from megatron.core.datasets.read_megatron_index_cache import index_problem

TOKENIZER = types.SimpleNamespace(vocab_size=100, eod=99)


S, SEED, SAMPLES = 8, 7, 50


def write_data(prefix, seed=0):
    """20 documents of 0 to 39 tokens."""
    rng = np.random.RandomState(seed)
    lengths = rng.randint(0, 40, 20)
    write(prefix, [[rng.randint(0, 99, length).tolist()] for length in lengths])


class Run:
    """A small training set, and a cache of the same samples in another order, which only a cache that is read can give."""

    def __init__(self, folder):
        self.prefix, self.cache = str(folder / "text"), folder / "cache"
        write_data(self.prefix)
        self.said, self.done = [], []
        order = self.built().shuffle_index
        self.arrays = self.built()._replace(shuffle_index=order[[1, 0, *range(2, len(order))]])

    def built(self):
        lengths = IndexedDataset(self.prefix).sequence_lengths
        return build_indices(lengths, IndexRequest((0, 20), SAMPLES, S, SEED))

    def leave_cache(self, folder=None, **changes):
        described = {"dataset_path": "/elsewhere/text", "index_split": "train", "tokenizer": {}}
        described |= {"num_samples": SAMPLES, "random_seed": SEED, "sequence_length": S} | changes
        return write_cache(folder or self.cache, "GPTDataset", "train", described, self.arrays._asdict())

    def takes(self, **flags):
        """Whether the cache that was left is what is read."""
        config = DataConfig([self.prefix], seq_length=S, split="1", **{"data_cache_path": str(self.cache)} | flags)
        heard = {"say": self.said.append, "progress": self.done.append}
        order = build_gpt_datasets(config, TOKENIZER, [SAMPLES, 0, 0], SEED, **heard)[0].indices.shuffle_index
        taken = np.array_equal(order, self.arrays.shuffle_index)
        assert taken or "epoch_stable_order" in flags or np.array_equal(order, self.built().shuffle_index)
        return taken


def test_a_cache_of_megatron_is_taken_once_and_kept_as_ours(tmp_path):
    """From the given folder, from the one beside the data, and by the names of versions before 2023."""
    run = Run(tmp_path)
    stem = run.leave_cache()
    assert run.takes() and any(tells(line, f"{stem}*") for line in run.done) and not run.said
    for path in run.cache.glob(f"{Path(stem).name}*"):
        path.unlink()
    assert run.takes() and not run.takes(data_cache_path=str(tmp_path / "other"))
    run.leave_cache(folder=tmp_path / "text" / "cache" / "GPTDataset_indices")
    assert run.takes(data_cache_path=None)
    for name, array in zip(("doc_idx", "sample_idx", "shuffle_idx"), run.arrays):
        np.save(f"{run.prefix}_train_indexmap_{SAMPLES}ns_{S}sl_{SEED}s_{name}.npy", array)
    assert run.takes(data_cache_path=str(tmp_path / "third"))


def saved(change):
    return lambda path: np.save(path, change(np.load(path)), allow_pickle=True)


def one_more(at):
    return saved(lambda array: array + (np.arange(array.size) == at).astype(array.dtype).reshape(array.shape))


DOCUMENTS, STARTS, ORDER, DESCRIPTION = "document_index.npy", "sample_index.npy", "shuffle_index.npy", "description.txt"


DAMAGE = {
    "cut": (STARTS, lambda path: path.write_bytes(path.read_bytes()[:-3]), "cannot be read"),
    "no array": (ORDER, lambda path: path.write_bytes(b"?"), "cannot be read"),
    "missing": (ORDER, lambda path: path.unlink(), "cannot be read"),
    "pickled": (DOCUMENTS, saved(lambda array: np.array([{}])), "cannot be read"),
    "floats": (ORDER, saved(lambda array: array.astype(float)), "float64"),
    "shorter": (ORDER, saved(lambda array: array[1:]), "shuffle_index is uint32"),
    "past int64": (ORDER, saved(lambda array: array.astype(np.uint64) + 2**63), "shuffle_index"),
    "a document twice": (DOCUMENTS, one_more(3), "document_index"),
    "a start moved": (STARTS, one_more(41), "sample_index"),
    "a sample twice": (ORDER, one_more(5), "shuffle_index"),
    "other lengths": (ORDER, lambda path: write_data(path.parents[1] / "text", seed=1), "_index"),  # as many documents
    "a changed description": (DESCRIPTION, lambda path: path.write_text(path.read_text() + "\n"), None),
    "no description": (DESCRIPTION, lambda path: path.write_bytes(b"\xff"), None),
}


OTHERS = [{}, {"num_samples": 51}, {"random_seed": 8}, {"sequence_length": 9}, {"dataset_path": "/elsewhere/other"}]


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_cache_is_named_and_not_taken(tmp_path, kind):
    """Without its description it is none of Megatron's."""
    (part, damage, reason), run = DAMAGE[kind], Run(tmp_path)
    stem = run.leave_cache()
    damage(Path(f"{stem}-{part}"))
    assert not run.takes()
    assert [reason in line and tells(line, f"{stem}*") for line in run.said] == [True] * (reason is not None)


@pytest.mark.parametrize("other", OTHERS)
def test_a_cache_of_another_request_is_passed_over(tmp_path, other):
    """The first request is for an order that Megatron does not have."""
    run = Run(tmp_path)
    run.leave_cache(**other)
    assert not run.takes(**{} if other else {"epoch_stable_order": True}) and not run.said


def test_every_request_of_ours_would_be_taken():
    """The checks pass what was built right: with a last epoch apart, in one epoch, of one document, of one sample."""
    rng = np.random.RandomState(3)
    for _ in range(60):
        lengths = np.append(rng.randint(0, 30, rng.randint(1, 12)), 12)
        request = IndexRequest((0, len(lengths)), int(rng.randint(1, 200)), int(rng.randint(1, 10)), 5)
        assert index_problem(build_indices(lengths, request), lengths, request) is None


@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("spoil", [None, *(lambda a: 1 - a, lambda a: a[1:], lambda a: a + 50, lambda a: a * 1.0)])
def test_the_order_of_a_blend_is_taken_if_it_is_that_of_the_weights(tmp_path, weighted, spoil):
    """Named where one of its arrays is spoiled."""
    prefixes, count, heard = [str(tmp_path / name) for name in "ab"], 30 if weighted else None, []
    for seed, prefix in enumerate(prefixes):
        write_data(prefix, seed)
    words = ["0.7", prefixes[0], "0.3", prefixes[1]] if weighted else prefixes
    config = DataConfig(data_path=words, seq_length=S, split="1", data_cache_path=str(tmp_path / "first"))
    first = build_gpt_datasets(config, TOKENIZER, [count, 0, 0], SEED)[0]
    weights = [0.7, 0.3] if weighted else [len(dataset) for dataset in first.datasets]
    order = (weighted_indices(weights, len(first)) if weighted else exhaustive_indices(weights))._asdict()
    described = {"datasets": [{}, {}], "weights": weights, "size": len(first) if weighted else None}
    for name in order if spoil else ["dataset_index"]:
        left = order | ({name: spoil(order[name])} if spoil else {})
        stem = write_cache(tmp_path / name, "BlendedDataset", "train", described, left)
        there, said = (
            replace(config, data_cache_path=str(tmp_path / name)),
            {"say" if spoil else "progress": heard.append},
        )
        again = build_gpt_datasets(there, TOKENIZER, [count, 0, 0], SEED, **said)[0]
        assert any(tells(line, f"{stem}*") for line in heard)
        assert all(np.array_equal(again[i]["tokens"], first[i]["tokens"]) for i in range(len(first)))
