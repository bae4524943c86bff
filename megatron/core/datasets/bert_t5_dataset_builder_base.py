"""Data sets of sentences (BERT, T5) draw their samples from a file in the same way."""

import numpy as np

from megatron.core.base.dataclass_flags import flag_of
from megatron.core.datasets.build_datasets import FileSplit, SampleKind, Say
from megatron.core.datasets.data_config import DataConfig
from megatron.core.datasets.mmap_indexed_dataset import IndexedDataset
from megatron.core.datasets.sentence_sample_map import build_sample_map


class SentenceSamples(SampleKind):
    """The kind of samples that are consecutive sentences of one document.

    In its files a sequence is a sentence. --split divides documents.
    """

    arrays = ("sample_index",)

    def elements(self, indexed: IndexedDataset) -> int:
        return indexed.document_count

    def build(self, file_split: FileSplit, say: Say) -> tuple[np.ndarray]:
        """Build the sample map: (uint32 or uint64 [samples, 3],), as of `build_sample_map`."""
        indexed = file_split.indexed
        return (build_sample_map(indexed.sequence_lengths, indexed.document_indices, file_split.request),)


# Flags about several documents in a sample, and about GPT's order: these samples have neither.
_GPT_SETTINGS = (
    "eod_mask_loss",
    "reset_position_ids",
    "reset_attention_mask",
    "dataloader_inter_document_masking",
    "epoch_stable_order",
)


def gpt_flag_problems(config: DataConfig, model: str) -> list[str]:
    """Return a line for each flag that is set and has no meaning for `model`."""
    return [
        f"{flag_of(name)} has no meaning for {model}, whose samples are sentences of one document; leave it out"
        for name in _GPT_SETTINGS
        if getattr(config, name)
    ]
