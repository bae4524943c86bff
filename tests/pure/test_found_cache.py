"""Megatron's index caches: found by their descriptions, taken if every number fits, else built anew. The order of samples is the same."""

import hashlib
import json
import types
from pathlib import Path

import numpy as np
import pytest
from said import tells

from megatron.core.datasets import DataConfig, IndexedDatasetWriter, build_gpt_datasets
from megatron.core.datasets.blend import exhaustive_indices, normalized, weighted_indices
from megatron.core.datasets.found_cache import blend_problem, index_problem
from megatron.core.datasets.index_map import IndexRequest, build_indices

TOKENIZER = types.SimpleNamespace(vocab_size=100, eod=99)
S, SEED = 8, 7


def write_data(prefix, count=20, seed=0):
    """Documents of 0 to 39 tokens; returns their lengths."""
    rng = np.random.RandomState(seed)
    lengths = rng.randint(0, 40, count)
    with IndexedDatasetWriter(prefix, np.uint16) as writer:
        for length in lengths:
            writer.add_document(rng.randint(0, 99, length))
    return lengths


def write_cache(folder, kind, split, description, arrays):
    """As Megatron names and writes it; returns the path without its ending."""
    text = json.dumps({"class": kind, **description}, indent=4)
    stem = folder / f"{hashlib.md5(text.encode()).hexdigest()}-{kind}-{split}"
    folder.mkdir(exist_ok=True)
    Path(f"{stem}-description.txt").write_text(text)
    for name, array in arrays.items():
        np.save(f"{stem}-{name}.npy", array)
    return str(stem)


def recognizable(indices):
    """The same samples in another order, which only a cache that is read can give."""
    return indices._replace(shuffle_index=indices.shuffle_index[[1, 0, *range(2, len(indices.shuffle_index))]])


class Run:
    """A small training set, with the cache that Megatron would have left; what is said and done is kept."""

    def __init__(self, folder, samples=50):
        self.prefix, self.cache = str(folder / "text"), folder / "cache"
        self.lengths = write_data(self.prefix)
        self.request = IndexRequest((0, 20), samples, S, SEED)
        self.arrays = recognizable(build_indices(self.lengths, self.request))
        self.said, self.done = [], []

    def leave_cache(self, path=None, folder=None, **changes):
        described = {"dataset_path": path or f"/elsewhere/{Path(self.prefix).name}", "index_split": "train"}
        described |= {"num_samples": self.request.num_samples, "random_seed": SEED, "sequence_length": S}
        arrays = self.arrays._asdict()
        return write_cache(folder or self.cache, "GPTDataset", "train", described | {"tokenizer": {}} | changes, arrays)

    def build(self, **flags):
        config = DataConfig(data_path=[self.prefix], seq_length=S, split="1", data_cache_path=str(self.cache), **flags)
        sizes = [self.request.num_samples, 0, 0]
        return build_gpt_datasets(config, TOKENIZER, sizes, SEED, say=self.said.append, progress=self.done.append)[0]

    def takes(self, **flags):
        """Whether the cache that was left is what is read."""
        order = self.build(**flags).indices.shuffle_index
        plain = build_indices(self.lengths, self.request).shuffle_index
        taken = np.array_equal(order, self.arrays.shuffle_index)
        assert taken or flags or np.array_equal(order, plain)
        return taken


def test_a_cache_of_megatron_is_taken_once_and_kept_as_ours(tmp_path):
    run = Run(tmp_path)
    stem = run.leave_cache()
    assert run.takes()
    assert any(tells(line, f"{stem}*") for line in run.done) and not run.said
    for path in Path(stem).parent.glob(f"{Path(stem).name}*"):
        path.unlink()
    assert run.takes(), "ours holds it now"


def test_a_cache_beside_the_data_is_found_too(tmp_path):
    run = Run(tmp_path)
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "cache").mkdir()
    run.leave_cache(folder=tmp_path / "text" / "cache" / "GPTDataset_indices")
    config = DataConfig(data_path=[run.prefix], seq_length=S, split="1")
    train = build_gpt_datasets(config, TOKENIZER, [50, 0, 0], SEED)[0]
    assert np.array_equal(train.indices.shuffle_index, run.arrays.shuffle_index)


def test_the_names_of_older_versions_are_known(tmp_path):
    run = Run(tmp_path)
    for name, array in zip(("doc_idx", "sample_idx", "shuffle_idx"), run.arrays):
        np.save(f"{run.prefix}_train_indexmap_50ns_{S}sl_{SEED}s_{name}.npy", array)
    assert run.takes()


@pytest.mark.parametrize(
    "other", [{"num_samples": 51}, {"random_seed": 8}, {"sequence_length": 9}, {"path": "/elsewhere/other"}]
)
def test_a_cache_of_another_request_is_passed_over(tmp_path, other):
    run = Run(tmp_path)
    run.leave_cache(**other)
    assert not run.takes()
    assert not run.said


def test_an_order_that_megatron_does_not_have_is_built(tmp_path):
    run = Run(tmp_path)
    run.leave_cache()
    assert not run.takes(epoch_stable_order=True)


def cut(path):
    path.write_bytes(path.read_bytes()[:-3])


def changed(at):
    def change(path):
        array = np.load(path)
        array.flat[at] += 1
        np.save(path, array)

    return change


DAMAGE = {
    "cut": ("sample_index.npy", cut, "cannot be read"),
    "no array": ("shuffle_index.npy", lambda path: path.write_bytes(b"?"), "cannot be read"),
    "missing": ("shuffle_index.npy", lambda path: path.unlink(), "cannot be read"),
    "pickled": ("document_index.npy", lambda path: np.save(path, np.array([{}]), allow_pickle=True), "cannot be read"),
    "floats": ("shuffle_index.npy", lambda path: np.save(path, np.load(path).astype(float)), "is float64"),
    "shorter": ("shuffle_index.npy", lambda path: np.save(path, np.load(path)[1:]), "its shuffle_index is uint32"),
    "a document twice": ("document_index.npy", changed(3), "does not hold each document"),
    "a start moved": ("sample_index.npy", changed(41), "that of other data"),
    "a sample twice": ("shuffle_index.npy", changed(5), "does not hold each sample once"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_cache_is_not_taken(tmp_path, kind):
    run = Run(tmp_path)
    part, damage, reason = DAMAGE[kind]
    stem = run.leave_cache()
    damage(Path(f"{stem}-{part}"))
    assert not run.takes()
    assert len(run.said) == 1 and tells(run.said[0], f"{stem}*") and reason in run.said[0]


def test_a_description_that_was_changed_is_none_of_megatrons(tmp_path):
    run = Run(tmp_path)
    described = Path(f"{run.leave_cache()}-description.txt")
    described.write_text(described.read_text() + "\n")
    assert not run.takes()
    described.write_bytes(b"\xff")
    assert not run.takes()


def test_data_of_other_lengths_do_not_get_the_cache(tmp_path):
    run = Run(tmp_path)
    run.leave_cache()
    run.lengths = write_data(run.prefix, seed=1)  # as many documents under the same name
    assert not run.takes()
    assert run.said


def test_every_request_of_ours_would_be_taken():
    """The checks pass what was built right: with a last epoch apart, in one epoch, of one document, of one sample."""
    rng = np.random.RandomState(3)
    for _ in range(60):
        lengths = rng.randint(0, 30, rng.randint(1, 12))
        if lengths.sum() < 12:
            continue
        request = IndexRequest((0, len(lengths)), int(rng.randint(1, 200)), int(rng.randint(1, 10)), 5)
        assert index_problem(build_indices(lengths, request), lengths, request) is None


BLENDS = [(normalized([3, 1]), 200), (normalized([1.0]), 5), (normalized(list(range(1, 40))), 3000)]


@pytest.mark.parametrize(("shares", "size"), BLENDS)
def test_an_order_of_a_blend_is_checked(shares, size):
    fields = {"shares": shares, "size": size, "sizes": None}
    right = weighted_indices(shares, size)
    assert blend_problem(right, fields) is None
    assert "whole numbers" in blend_problem(right._replace(dataset_index=right.dataset_index[1:]), fields)
    wrong = right.dataset_sample_index.copy()
    wrong[-1] += 1
    assert "does not count" in blend_problem(right._replace(dataset_sample_index=wrong), fields)
    if len(shares) > 1:
        swapped = right.dataset_index.copy()
        swapped[[0, 1]] = swapped[[1, 0]] if swapped[0] != swapped[1] else (1, 0)
        assert "first choices" in blend_problem(right._replace(dataset_index=swapped), fields)
        assert "others than" in blend_problem(right._replace(dataset_index=right.dataset_index + 50), fields)
        zeros = np.zeros_like(right.dataset_index)
        assert "shares" in blend_problem(right._replace(dataset_index=zeros), fields)


@pytest.mark.parametrize("weighted", [True, False])
def test_the_order_of_a_blend_is_taken(tmp_path, weighted):
    for name, seed in (("a", 1), ("b", 2)):
        write_data(tmp_path / name, seed=seed)
    words = ["0.7", str(tmp_path / "a"), "0.3", str(tmp_path / "b")] if weighted else [str(tmp_path / n) for n in "ab"]
    config = DataConfig(data_path=words, seq_length=S, split="1", data_cache_path=str(tmp_path / "cache"))
    done = []
    first = build_gpt_datasets(config, TOKENIZER, [30 if weighted else None, 0, 0], SEED)[0]
    sizes = [len(dataset) for dataset in first.datasets]
    order = weighted_indices([0.7, 0.3], len(first)) if weighted else exhaustive_indices(sizes)
    described = {"datasets": [{}, {}], "split": "train", "weights": [0.7, 0.3] if weighted else sizes}
    described["size"] = len(first) if weighted else None
    for path in (tmp_path / "cache").glob("*Blended*"):
        path.unlink()
    stem = write_cache(tmp_path / "cache", "BlendedDataset", "train", described, order._asdict())
    again = build_gpt_datasets(config, TOKENIZER, [30 if weighted else None, 0, 0], SEED, progress=done.append)[0]
    assert any(tells(line, f"{stem}*") for line in done)
    assert all(np.array_equal(again[i]["tokens"], first[i]["tokens"]) for i in range(len(first)))
