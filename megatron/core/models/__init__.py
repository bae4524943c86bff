"""Whole models, and the parts they share."""

from megatron.core.lazy import lazy_names

__getattr__, __dir__ = lazy_names(
    __name__, {".bert": "BertModel", ".gpt": "GPTModel", ".language_model": "TransformerLanguageModel"}
)
