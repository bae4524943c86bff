"""Import path of Megatron core. Our own model is `megatron.core.models.bert_model`."""

from megatron.core.classic.models import BertModel as BertModel
