"""BERT: Megatron's `BertModel` and layer specs, and our stage of it (`bert_stage`)."""

from typing import TYPE_CHECKING

from megatron.core.base.lazy_imports import lazy_names

if TYPE_CHECKING:
    from megatron.core.models.bert.bert_model import BertModel as BertModel

__getattr__, __dir__ = lazy_names(__name__, {".bert_model": "BertModel"})
