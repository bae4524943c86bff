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
    """Samples of one file in one split. A subclass makes what it needs in `_finalize`, and has `__len__` and `__getitem__`.

    indices: the elements of the file, as `numel_low_level_dataset` counts them, that the split has. num_samples: at least so
    many; None: one epoch.
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
        """Called once, when the fields are there."""

    @staticmethod
    def numel_low_level_dataset(low_level_dataset: LowLevelDataset) -> int:
        return len(low_level_dataset)

    @staticmethod
    def build_low_level_dataset(dataset_path: str, config: Any) -> LowLevelDataset:
        return IndexedDataset(dataset_path, mmap=config.mmap_bin_files)


@dataclass(eq=False)
class WithMask:
    """Samples as tensors, with the mask that a loop of its own passes to the model, unless its config says otherwise.

    The mask: bool [1, s, s], True where attention is masked.
    """

    samples: Any
    config: BlendedMegatronDatasetConfig

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        item = dict(self.samples[i])
        documents = item.pop("document_ids", None)
        if self.config.create_attention_mask:
            later = np.triu(np.ones((self.config.sequence_length,) * 2, bool), 1)
            masked = later if documents is None else later | (documents[:, None] != documents[None, :])
            item["attention_mask"] = masked[None]
        return {name: torch.from_numpy(array) for name, array in item.items()}


__getattr__ = names_of_megatron(__name__)
