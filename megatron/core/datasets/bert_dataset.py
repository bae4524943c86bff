"""Megatron's BERT data set and its config."""

from dataclasses import dataclass

from megatron.core.base.lazy_imports import names_of_megatron
from megatron.core.datasets.blended_megatron_dataset_config import BlendedMegatronDatasetConfig


@dataclass(kw_only=True)
class BERTMaskedWordPieceDatasetConfig(BlendedMegatronDatasetConfig):
    """Megatron's settings of masked samples of files of sentences."""

    masking_probability: float = 0.15
    short_sequence_probability: float = 0.1
    masking_max_ngram: int = 3
    masking_do_full_word: bool = True
    masking_do_permutation: bool = False
    masking_use_longer_ngrams: bool = False
    masking_use_geometric_distribution: bool = False
    classification_head: bool = True


class BERTMaskedWordPieceDataset:
    """Names the kind for `BlendedMegatronDatasetBuilder`: masked samples of files of sentences."""


__getattr__ = names_of_megatron(__name__)
