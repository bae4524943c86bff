"""Build models with Megatron's older constructors, which take their settings from the run."""

from typing import TYPE_CHECKING

from megatron.core.base.lazy_imports import lazy_names

if TYPE_CHECKING:
    from megatron.legacy.model.bert_model import BertModel as BertModel
    from megatron.legacy.model.gpt_model import GPTModel as GPTModel
    from megatron.legacy.model.module import Float16Module as Float16Module
    from megatron.legacy.model.t5_model import T5Model as T5Model

__getattr__, __dir__ = lazy_names(
    __name__, {".bert_model": "BertModel", ".gpt_model": "GPTModel", ".module": "Float16Module", ".t5_model": "T5Model"}
)
