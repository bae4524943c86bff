"""Import path of Megatron core. Our own model is `megatron.core.models.gpt_model`."""

from megatron.core.classic.models import GPTModel as GPTModel
