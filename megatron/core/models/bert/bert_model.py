"""Import path of Megatron core."""

from megatron.core.classic.models import BertModel as BertModel
