"""Embeddings: ours, and Megatron's `LanguageModelEmbedding` and `RotaryEmbedding` over it."""

from megatron.core.base.lazy_imports import lazy_names

__getattr__, __dir__ = lazy_names(
    __name__, {".language_model_embedding": "LanguageModelEmbedding", ".rotary_pos_embedding": "RotaryEmbedding"}
)
