"""The class SFTDataset, built as Megatron's scripts build it, gives the packed samples of --sft with Megatron's keys."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sft_folder import chats, write_lines, write_tokenizer
from torch.utils.data import default_collate

from megatron.core.base.dataclass_flags import ConfigError
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.data_config import DataConfig
from megatron.core.datasets.gpt_dataset import GPTDatasetConfig
from megatron.core.datasets.sft_dataset import build_sft_datasets
from megatron.core.datasets.utils import Split
from megatron.core.tokenizers import TokenizerConfig, build_tokenizer
from megatron.training.datasets.sft_dataset import SFTDataset

LENGTH = 200


@pytest.fixture
def tokenizer(tmp_path: Path) -> Any:
    write_tokenizer(tmp_path / "tokenizer")
    return build_tokenizer(TokenizerConfig("HuggingFaceTokenizer", tokenizer_model=str(tmp_path / "tokenizer")))


def config_of(path: Path, tokenizer: Any, length: int = LENGTH) -> GPTDatasetConfig:
    settings = {"random_seed": 7, "sequence_length": length, "split": "8,2,0", "tokenizer": tokenizer}
    return GPTDatasetConfig(blend=([str(path)], None), create_attention_mask=False, **settings)


def test_the_builder_gives_the_samples_of_sft_with_the_borders_of_examples(tokenizer: Any, tmp_path: Path):
    path = write_lines(tmp_path / "chats.jsonl", chats(20))
    train, valid, test = BlendedMegatronDatasetBuilder(SFTDataset, [9, None, 0], config_of(path, tokenizer)).build()
    flags = DataConfig(
        data_path=[str(path)],
        split="8,2,0",
        seq_length=LENGTH,
        sft=True,
        reset_position_ids=True,
        reset_attention_mask=True,
    )
    ours = build_sft_datasets(flags, tokenizer, [9, None, 0], 7)
    assert len(train) == len(ours[0]) >= 9 and len(valid) == len(ours[1]) and test is None
    for dataset, samples in ((train, ours[0]), (valid, ours[1])):
        for i in range(len(dataset)):
            sample = dataset[i]
            expected = samples[i]
            for name, array in expected.items():
                assert np.array_equal(sample[name].numpy(), array) and sample[name].numpy().dtype == array.dtype
            borders = sample["cu_seqlens"]
            assert borders.dtype == torch.int32 and borders.shape == (LENGTH + 1,) and borders[-1] == LENGTH
            lengths = [int(n) for n in borders.diff() if n]
            assert lengths == np.bincount(expected["document_ids"]).tolist()
            assert int(sample["max_seqlen"]) == max(lengths)
            starts = borders[:-1][borders.diff() > 0]
            assert not sample["position_ids"][starts.long()].any()
    batch = default_collate([train[0], train[1]])  # any two samples have equal shapes
    assert batch["cu_seqlens"].shape == (2, LENGTH + 1) and batch["max_seqlen"].shape == (2,)


def test_it_is_built_from_a_low_level_data_set_and_indices(tokenizer: Any, tmp_path: Path):
    path = write_lines(tmp_path / "chats.jsonl", chats(6))
    config = config_of(path, tokenizer)
    examples = SFTDataset.build_low_level_dataset(str(path), config)
    assert SFTDataset.numel_low_level_dataset(examples) == 6
    dataset = SFTDataset(examples, str(path), np.array([1, 4]), None, Split.valid, config)
    (sample,) = [dataset[i] for i in range(len(dataset))]
    trained = sample["labels"][sample["loss_mask"] > 0].tolist()
    answers = ["It is 1.<|im_end|>", "It is 2.<|im_end|>", "It is 4.<|im_end|>"]
    assert tokenizer.detokenize(trained) == "".join(answers)
    with pytest.raises(ConfigError, match="has no examples; use more data or a longer sequence_length"):
        SFTDataset(examples, str(path), np.array([1]), None, Split.valid, config_of(path, tokenizer, 2))
