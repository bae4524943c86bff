"""Megatron core's data set classes and their builder."""

import types

import numpy as np
import pytest
import torch
from token_files import write

from megatron.core.base.dataclass_flags import ConfigError
from megatron.core.datasets.blended_dataset import BlendedDataset
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset
from megatron.core.datasets.indexed_dataset import IndexedDataset
from megatron.core.datasets.utils import Split

TOKENIZER = types.SimpleNamespace(vocab_size=100, eod=99, pad=None)


class Doubled(GPTDataset):
    """A class of a script's own, over ours."""

    def __getitem__(self, idx):
        return {"tokens": 2 * super().__getitem__(idx)["tokens"]}


@pytest.fixture
def prefixes(tmp_path):
    rng = np.random.RandomState(0)
    names = [str(tmp_path / name) for name in ("a", "b")]
    for name in names:
        write(name, [[[*rng.randint(99, size=rng.randint(5, 40)).tolist(), 99]] for _ in range(50)])
    return names


def config(**options):
    return GPTDatasetConfig(random_seed=3, sequence_length=16, tokenizer=TOKENIZER, **options)


@pytest.mark.parametrize("of_prefixes", [lambda a, b: ([a], None), lambda a, b: ([a, b], [0.3, 0.7])])
def test_a_class_of_a_scripts_own_has_the_samples_of_ours(of_prefixes, prefixes):
    told = config(blend=of_prefixes(*prefixes), split="90,5,5")
    ours, own = (
        BlendedMegatronDatasetBuilder(cls, [40, 4, 0], lambda: True, told).build() for cls in (GPTDataset, Doubled)
    )
    assert ours[2] is None and own[2] is None
    for one, other in zip(ours[:2], own[:2]):
        assert len(one) == len(other)
        assert all(torch.equal(2 * one[i]["tokens"], other[i]["tokens"]) for i in range(len(one)))


def test_a_data_set_can_be_made_of_a_file_and_a_range(prefixes):
    indexed = IndexedDataset(prefixes[0])
    made = GPTDataset(indexed, prefixes[0], np.arange(5, 45), 30, Split.train, config(blend=([prefixes[0]], None)))
    assert len(made) >= 30 and made[0]["tokens"].shape == (16,) and made[0]["attention_mask"].shape == (1, 16, 16)
    with pytest.raises(NotImplementedError, match="gaps"):
        GPTDataset(indexed, prefixes[0], np.array([1, 3]), 5, Split.train, config(blend=([prefixes[0]], None)))
    mock = MockGPTDataset(None, None, None, 7, Split.valid, config(create_attention_mask=False))
    assert len(mock) == 7 and "attention_mask" not in mock[0]


def test_a_blend_takes_numbers_or_words_and_leaves_out_what_weighs_nothing(prefixes):
    a, b = prefixes
    blends = [[0, b, 1, a], ["0", b, "1", a], ([b, a], [0.0, 1.0])]
    made = [
        BlendedMegatronDatasetBuilder(Doubled, [20, 0, 0], config(blend_per_split=[blend, None, None])).build()[0]
        for blend in blends
    ]
    assert all(torch.equal(one[5]["tokens"], made[0][5]["tokens"]) for one in made)
    assert len(BlendedDataset([made[0]], [1.0], 5, None)) == 5 and len(BlendedDataset([made[0]], [3], None, None)) == 3


def test_a_field_that_is_not_built_is_refused_by_name():
    with pytest.raises(ConfigError, match="GPTDatasetConfig: hybrid_context_parallel=True"):
        BlendedMegatronDatasetBuilder(MockGPTDataset, [4, 4, 4], config(hybrid_context_parallel=True)).build()


@pytest.mark.parametrize("cls", [GPTDataset, Doubled])
def test_several_validation_sets_are_a_list_of_whole_epochs(prefixes, cls):
    told = config(
        blend_per_split=[(prefixes, [0.5, 0.5]), (prefixes, None), None],
        multiple_validation_sets=True,
        full_validation=True,
    )
    train, valid, test = BlendedMegatronDatasetBuilder(cls, [20, None, 0], lambda: True, told).build()
    assert len(train) >= 20 and test is None and isinstance(valid, list)
    epochs = [
        BlendedMegatronDatasetBuilder(cls, [9, None, 0], config(blend_per_split=[([p], None), ([p], None), None]))
        for p in prefixes
    ]
    assert [len(one) for one in valid] == [len(builder.build()[1]) for builder in epochs]
