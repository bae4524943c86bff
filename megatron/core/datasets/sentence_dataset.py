"""What data sets of sentences (BERT, T5) share: how their samples are drawn from a file."""

import numpy as np

from megatron.core.base.dataclass_flags import flag_of
from megatron.core.datasets.build_datasets import Part, SampleKind, Say
from megatron.core.datasets.data_config import DataConfig
from megatron.core.datasets.mmap_indexed_dataset import IndexedDataset
from megatron.core.datasets.sentence_sample_map import build_sample_map


class SentenceSamples(SampleKind):
    """Runs of sentences of one document, from files whose sequences are sentences. --split divides documents."""

    arrays = ("sample_index",)

    def elements(self, indexed: IndexedDataset) -> int:
        return indexed.document_count

    def build(self, part: Part, say: Say) -> tuple[np.ndarray]:
        indexed = part.indexed
        try:
            return (build_sample_map(indexed.sequence_lengths, indexed.document_indices, part.request),)
        except ValueError as error:
            raise ValueError(f"{indexed.prefix}, {part.split} split: {error}") from None


# Flags that ask for what a sample of one document in an order of its own does not have.
_OF_GPT = ("eod_mask_loss", "reset_position_ids", "reset_attention_mask", "epoch_stable_order")


def problems_of_flags_of_gpt(config: DataConfig, model: str) -> list[str]:
    """A line for each flag that has no meaning for `model`."""
    return [
        f"{flag_of(name)} has no meaning for {model}, whose samples are sentences of one document; leave it out"
        for name in _OF_GPT
        if getattr(config, name)
    ]
