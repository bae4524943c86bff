"""Import path of Megatron without `core`: `megatron.legacy.model`."""

from megatron.core.base.lazy_imports import names_of_megatron
from megatron.legacy.model.bert_model import BertModel as BertModel
from megatron.legacy.model.gpt_model import GPTModel as GPTModel
from megatron.legacy.model.module import Float16Module as Float16Module
from megatron.legacy.model.t5_model import T5Model as T5Model

__getattr__ = names_of_megatron(__name__)
