"""Megatron's T5 data set and its config."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from megatron.core.base.lazy_imports import names_of_megatron
from megatron.core.datasets.blended_megatron_dataset_config import BlendedMegatronDatasetConfig


@dataclass(kw_only=True)
class T5MaskedWordPieceDatasetConfig(BlendedMegatronDatasetConfig):
    """Megatron's settings of texts with hidden spans, and of the spans, from files of sentences.

    sequence_length, sequence_length_decoder: tokens of the encoder's and of the decoder's text.
    """

    sequence_length_decoder: int
    masking_probability: float = 0.15
    short_sequence_probability: float = 0.1
    masking_max_ngram: int = 10
    masking_do_full_word: bool = True
    masking_do_permutation: bool = False
    masking_use_longer_ngrams: bool = False
    masking_use_geometric_distribution: bool = True

    only_values: ClassVar[Mapping[str, Any]] = {"masking_max_ngram": 10, "masking_use_geometric_distribution": True}

    @property
    def decoder_length(self) -> int:
        """Tokens of the decoder's text."""
        return self.sequence_length_decoder

    @property
    def sequence_length_encoder(self) -> int:
        """Tokens of the encoder's text."""
        return self.sequence_length


class T5MaskedWordPieceDataset:
    """Names the kind for `BlendedMegatronDatasetBuilder`: texts with hidden spans of files of sentences."""

    @staticmethod
    def config_attention_mask(
        encoder_tokens: Tensor,
        decoder_tokens: Tensor,
        encoder_mask: Tensor,
        decoder_mask: Tensor,
        use_local: bool = False,
        test_te_version: str | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the masks of the encoder, of the decoder, and of its attention to the encoder.

        encoder_mask [b, s], decoder_mask [b, t]: bool, True at padding. The masks: bool [b, 1, s, s], [b, 1, t, t] and
        [b, 1, t, s], True where a query may not see a key. Every implementation of a layer takes these.
        """
        del encoder_tokens, decoder_tokens, use_local, test_te_version
        queries = (encoder_mask[:, None, :, None], decoder_mask[:, None, :, None])
        keys = (encoder_mask[:, None, None, :], decoder_mask[:, None, None, :])
        t = decoder_mask.shape[1]
        future = torch.ones(t, t, dtype=torch.bool, device=decoder_mask.device).triu(1)  # [t, t], after the query
        return queries[0] | keys[0], queries[1] | keys[1] | future, queries[1] | keys[0]


@dataclass(eq=False)
class WithCrossAttentionMask:
    """T5's samples with enc_dec_mask, int64 [t, s], 1 where a token of the decoder may see one of the encoder.

    Some scripts broadcast it with the other entries; the model does not read it.
    """

    samples: Any  # a data set of {"enc_mask": [s], "dec_mask": [t], ...}

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, i: int) -> dict[str, np.ndarray]:
        """Return sample i, with the further mask."""
        item = dict(self.samples[i])
        item["enc_dec_mask"] = np.outer(item["dec_mask"], item["enc_mask"])  # [t, s]
        return item


__getattr__ = names_of_megatron(__name__)
