"""Embeddings: ours, and Megatron's `LanguageModelEmbedding` and `RotaryEmbedding` over them."""

from typing import TYPE_CHECKING

from megatron.core.base.lazy_imports import lazy_names

if TYPE_CHECKING:
    from megatron.core.models.common.embeddings.language_model_embedding import (
        LanguageModelEmbedding as LanguageModelEmbedding,
    )
    from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding as RotaryEmbedding

__getattr__, __dir__ = lazy_names(
    __name__, {".language_model_embedding": "LanguageModelEmbedding", ".rotary_pos_embedding": "RotaryEmbedding"}
)
