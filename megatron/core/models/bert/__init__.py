"""BERT: Megatron's `BertModel` and layer specs, and our stage of it (`bert_stage`)."""

from megatron.core.base.lazy_imports import lazy_names

__getattr__, __dir__ = lazy_names(__name__, {".bert_model": "BertModel"})
