"""Import path of Megatron core."""

from megatron.core.classic.models import GPTModel as GPTModel
