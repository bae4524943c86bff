"""Megatron's `MegatronDataset`, the base class of data sets."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from megatron.core.base.lazy_imports import names_of_megatron
from megatron.core.datasets.blended_megatron_dataset_config import BlendedMegatronDatasetConfig
from megatron.core.datasets.indexed_dataset import IndexedDataset

LowLevelDataset = Any


@dataclass(eq=False)
class MegatronDataset(torch.utils.data.Dataset):
    """Samples of one file in one split.

    A subclass builds what it needs in `_finalize`, and has `__len__` and `__getitem__`.

    indices: integers [elements], those of the file, as `numel_low_level_dataset` counts them, that the split has.
    num_samples: at least so many; None: one epoch.
    """

    dataset: LowLevelDataset
    dataset_path: str | None
    indices: np.ndarray
    num_samples: int | None
    index_split: Any
    config: Any

    def __post_init__(self) -> None:
        self._finalize()

    def _finalize(self) -> None:
        """Build what the subclass needs; called once, after the fields are set."""

    @staticmethod
    def numel_low_level_dataset(low_level_dataset: LowLevelDataset) -> int:
        return len(low_level_dataset)

    @staticmethod
    def build_low_level_dataset(dataset_path: str, config: Any) -> LowLevelDataset:
        return IndexedDataset(dataset_path, mmap=config.mmap_bin_files)


@dataclass(eq=False)
class WithAttentionMask:
    """Samples as tensors, with the attention mask that Megatron's data sets have unless their config says otherwise.

    The mask: bool [1, s, s], True where attention is masked.
    """

    samples: Any
    config: BlendedMegatronDatasetConfig

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        """Return sample i as tensors [s], with attention_mask bool [1, s, s] if the config asks for it."""
        item = dict(self.samples[i])
        documents = item.pop("document_ids", None)
        if self.config.create_attention_mask:
            length = self.config.sequence_length
            masked = np.triu(np.ones((length, length), bool), 1)  # [s, s], True where the key comes after the query
            if documents is not None:
                masked = masked | (documents[:, None] != documents[None, :])  # [s, s], or is in another document
            item["attention_mask"] = masked[None]  # [1, s, s]
        return {name: torch.from_numpy(array) for name, array in item.items()}


@dataclass(eq=False)
class TokensAsText:
    """Samples in Megatron's earlier form: {"text": int64 [s + 1]}, whose labels are the inputs shifted by one."""

    samples: Any  # a data set of {"tokens": [s], "labels": [s], ...}

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, i: int) -> dict[str, np.ndarray]:
        """Return sample i: {"text": int64 [s + 1]}."""
        item = self.samples[i]
        return {"text": np.append(item["tokens"], item["labels"][-1:])}  # [s + 1]


__getattr__ = names_of_megatron(__name__)
