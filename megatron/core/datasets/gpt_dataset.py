"""Megatron's `GPTDataset`, `MockGPTDataset` and their config."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from megatron.core.base.lazy_imports import names_of_megatron
from megatron.core.datasets import gpt_dataset_and_builder
from megatron.core.datasets.blended_megatron_dataset_config import BlendedMegatronDatasetConfig, _check_pad
from megatron.core.datasets.build_datasets import naming_split
from megatron.core.datasets.index_map import build_indices
from megatron.core.datasets.megatron_dataset import LowLevelDataset, MegatronDataset, WithAttentionMask
from megatron.core.datasets.utils import Split


@dataclass(kw_only=True)
class GPTDatasetConfig(BlendedMegatronDatasetConfig):
    """Megatron's settings of samples of token files."""

    reset_position_ids: bool | None = False
    reset_attention_mask: bool | None = False
    eod_mask_loss: bool | None = False
    create_attention_mask: bool = True
    drop_last_partial_validation_sequence: bool = True
    add_extra_token_to_sequence: bool = True
    object_storage_cache_path: str | None = None
    data_parallel_size: int = 1
    sequence_parallel_size: int = 0
    hybrid_context_parallel: bool = False
    sequences_per_dataset: dict[str, int] | None = None
    context_parallel_size: int | None = None
    s3_cache_path: str | None = None
    vocab_size: int | None = None
    return_document_ids: bool = False
    inter_document_masking: bool = False


class GPTDataset(MegatronDataset):
    """Samples of a token file: those of `gpt_dataset_and_builder.GPTDataset`, as tensors.

    Its indices are built anew; `BlendedMegatronDatasetBuilder` caches them. indexed_indices: int [elements], the
    sequences of the split, without gaps.
    """

    def __init__(
        self,
        indexed_dataset: LowLevelDataset,
        dataset_path: str | None,
        indexed_indices: np.ndarray,
        num_samples: int | None,
        index_split: Any,
        config: Any,
    ):
        super().__init__(indexed_dataset, dataset_path, indexed_indices, num_samples, index_split, config)

    def _finalize(self) -> None:
        _check_pad(self.config)
        data = self.config.data
        rules = gpt_dataset_and_builder.token_rules(data, self.config.tokenizer)
        first = int(self.indices[0])
        past = int(self.indices[-1]) + 1
        if past - first != len(self.indices):
            raise NotImplementedError("GPTDataset: indices with gaps are not supported; give a contiguous range")
        kind = gpt_dataset_and_builder.GPTSamples(data, self.config.random_seed, rules)
        split = self.index_split.name if isinstance(self.index_split, Split) else "given"
        with naming_split(self.dataset_path or "the data set", split):
            request = kind.request((first, past), self.num_samples)
            indices = build_indices(self.dataset.sequence_lengths, request)
        samples = gpt_dataset_and_builder.GPTDataset(self.dataset, indices, data.seq_length, rules)
        self.samples = WithAttentionMask(samples, self.config)

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, idx: int) -> dict[str, torch.Tensor]:
        """Return sample idx: the arrays of `gpt_dataset_and_builder.training_item` as tensors, [s] each, and a mask.

        attention_mask: bool [1, s, s], True where attention is masked; absent if the config says so.
        """
        return self.samples[idx]


class MockGPTDataset(MegatronDataset):
    """Made-up samples, which need no file."""

    def _finalize(self) -> None:
        rules = gpt_dataset_and_builder.token_rules(self.config.data, self.config.tokenizer)
        seed = (self.config.random_seed, self.index_split.value)
        samples = gpt_dataset_and_builder.MockGPTDataset(self.num_samples, self.config.sequence_length, seed, rules)
        self.samples = WithAttentionMask(samples, self.config)

    __len__ = GPTDataset.__len__
    __getitem__ = GPTDataset.__getitem__


__getattr__ = names_of_megatron(__name__)
