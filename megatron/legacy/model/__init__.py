"""Models by Megatron's older constructors, which ask the run for its settings."""

from megatron.core.base.lazy_imports import lazy_names

__getattr__, __dir__ = lazy_names(
    __name__, {".bert_model": "BertModel", ".gpt_model": "GPTModel", ".module": "Float16Module"}
)
