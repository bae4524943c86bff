"""Import path of Megatron core. Our own model is `megatron.core.models.bert_model`."""

from megatron.core.lazy import lazy_names

__getattr__, __dir__ = lazy_names(__name__, {"megatron.core.classic.models": "BertModel"})
