"""Megatron's `SFTDataset` over the packed examples of --sft, for scripts that build their data sets by its name."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from megatron.core.base.dataclass_flags import ConfigError
from megatron.core.base.lazy_imports import names_of_megatron
from megatron.core.datasets import sft_dataset
from megatron.core.datasets.build_datasets import BuildContext
from megatron.core.datasets.data_config import DataConfig
from megatron.core.datasets.gpt_dataset_and_builder import token_rules
from megatron.core.datasets.megatron_dataset import MegatronDataset
from megatron.core.datasets.mmap_indexed_dataset import IndexedDataset
from megatron.core.datasets.utils import Split
from megatron.core.parallel import collectives
from megatron.core.parallel.global_state import get_global_state, model_parallel_is_initialized

IGNORE_INDEX = -100


@dataclass(frozen=True)
class SFTLowLevelDataset:
    """The examples of one file of JSON lines, as tokens; `SFTDataset.build_low_level_dataset` makes them."""

    tokens: IndexedDataset
    masks: IndexedDataset  # 1 where a token gives loss

    def __len__(self) -> int:
        return len(self.tokens)


class SFTDataset(MegatronDataset):
    """Packed samples of a file of examples, with the constructor of Megatron's `SFTDataset`.

    Examples are encoded and packed as --sft does it (docs/after_pretraining.md): by the chat template of the tokenizer's
    folder, whole examples one behind the other. Megatron makes a sample of each line instead. indices: those of the
    examples that the split has. num_samples: at least so many; None: one epoch. In a run --chat-template and
    --sft-split-turns count. Raises ConfigError for data that cannot be used, or without an example that fits.
    """

    def _finalize(self) -> None:
        length = self.config.sequence_length
        files = [(self.dataset.tokens, self.dataset.masks)]
        _, _, examples = sft_dataset.examples_in(files, [self.indices.tolist()], length)
        if not len(examples):
            raise ConfigError(
                f"{self.dataset_path}: its split has no examples; use more data or a longer sequence_length"
            )
        rules = token_rules(self.config.data, self.config.tokenizer)
        is_training = self.index_split in (None, Split.train)
        self.samples = sft_dataset.SFTDataset(
            examples, length, rules, self.config.random_seed, self.num_samples, shuffles=is_training
        )

    @staticmethod
    def build_low_level_dataset(dataset_path: str, config: Any) -> SFTLowLevelDataset:
        """Encode a file, or read its cache. In a run one rank encodes, and every rank must call."""
        data = _data_config_of_run(config)
        build = BuildContext()
        if model_parallel_is_initialized():
            world = get_global_state().mesh["world"]
            device = get_global_state().device
            build = BuildContext(is_builder=world.is_first, wait=lambda: collectives.barrier(world, device))
        opened = sft_dataset.encode_and_open(data, config.tokenizer, build, paths=[dataset_path])
        return SFTLowLevelDataset(*opened[dataset_path])

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, idx: int) -> dict[str, torch.Tensor]:
        """Return sample idx: tokens, labels, position_ids int64 [s], loss_mask float32 [s], and the borders of examples.

        cu_seqlens: int32 [s + 1], where each example begins, and s behind the last one; max_seqlen: int32 [], the longest.
        Padding is an example of its own. document_ids: int64 [s], the number of each token's example, of which a run makes
        its mask. Labels are ids everywhere; where `loss_mask` is 0, Megatron has IGNORE_INDEX for a question.
        """
        item = self.samples[idx]
        length = len(item["tokens"])
        starts = np.flatnonzero(np.diff(item["document_ids"], prepend=-1))
        borders = np.full(length + 1, length, np.int32)
        borders[: len(starts)] = starts
        sample = {name: torch.from_numpy(array) for name, array in item.items()}
        sample["cu_seqlens"] = torch.from_numpy(borders)
        sample["max_seqlen"] = torch.tensor(np.diff(borders).max())
        return sample


def _data_config_of_run(config: Any) -> DataConfig:
    """Return the settings of a data set's config, with those of a run that Megatron's config does not have."""
    run = get_global_state().run if model_parallel_is_initialized() else None
    if run is None:
        return config.data
    of_run = run.config.data
    return replace(config.data, chat_template=of_run.chat_template, sft_split_turns=of_run.sft_split_turns)


__getattr__ = names_of_megatron(__name__)
